"""verify: epsilon from a ledger or a model folder alone; whatever was changed is found."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.ledger_kit import killed, started, steps

import weightclip as wc
from weightclip.accounting._accounting import Mechanism, epsilon
from weightclip.cli import _verify, main
from weightclip.tabular._estimators import LipDPClassifier


def run(capsys, *arguments, expect: int = 0):
    with pytest.raises(SystemExit) as exit:
        main(["verify", *(str(a) for a in arguments)])
    captured = capsys.readouterr()
    assert exit.value.code == expect, captured
    if expect:
        assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "run.ledger"
    for sigma, count in ((1.0, 3), (2.0, 2)):
        made = started(path, sigma=sigma)
        steps(made, count)
        killed(made)
    return path


TRUTH = [Mechanism("gaussian", 1.0, 0.25, 3), Mechanism("gaussian", 2.0, 0.25, 2)]


def test_a_ledger(ledger: Path, capsys) -> None:
    shown = run(capsys, ledger, "--delta", "1e-5").out.splitlines()
    assert "5 charges in 2 run(s)" in shown[0] and shown[-1] == "ok"
    assert shown[1].split() == ["3", "x", "gaussian,", "sigma", "1,", "q", "0.25,", "noisy", "gradients"]
    assert f"epsilon    {epsilon(TRUTH, 1e-5):.6g} at delta 1e-05 (pld, add_or_remove_one)" in shown
    for accountant in ("pld", "rdp"):
        found = json.loads(run(capsys, ledger, "--delta", "1e-6", "--accountant", accountant, "--json").out)
        assert found["epsilon"] == epsilon(TRUTH, 1e-6, accountant) and found["ok"] and found["charges"] == 5
        assert [m["charges"] for m in found["mechanisms"]] == [3, 2]


def test_a_ledger_of_a_budget_knows_its_delta(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.ledger"
    made = started(path, sigma=None, target_epsilon=2.0, target_delta=1e-4, epochs=1.0)
    steps(made, 4)
    found = json.loads(run(capsys, path, "--accountant", "rdp", "--json").out)  # also while the engine holds it
    assert found["delta"] == 1e-4 and found["epsilon"] == made.engine.get_epsilon(1e-4) <= 2.0


def test_pure_and_noiseless_runs(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.ledger"
    made = started(path, sigma=4.0, mechanism=wc.KNorm(1))
    steps(made, 2)
    killed(made)
    assert "2 x pure, epsilon0 0.25" in run(capsys, path, "--delta", "1e-5").out
    made = started(path, sigma=0.0)
    steps(made, 1)
    killed(made)
    assert "epsilon    inf" in run(capsys, path, "--delta", "1e-5").out
    assert json.loads(run(capsys, path, "--delta", "1e-5", "--json").out)["epsilon"] == "inf"


def test_a_torn_end_is_counted_and_said(ledger: Path, capsys) -> None:
    data = ledger.read_bytes()
    ledger.write_bytes(data[:-20])
    assert "5 charges in 2 run(s), 1 of them for a torn last line" in run(capsys, ledger, "--delta", "1e-5").out
    assert ledger.read_bytes() == data[:-20]  # looking changes nothing


def test_what_was_changed_is_found(ledger: Path, capsys, tmp_path: Path) -> None:
    data = ledger.read_bytes()
    lines = data.splitlines(keepends=True)
    for changed in (
        data.replace(b":1.0", b":3.0"),
        b"".join(lines[:3] + lines[4:]),
        b"".join(lines[:2] + lines[:1:-1]),
    ):
        ledger.write_bytes(changed)
        assert "was changed, removed or moved" in run(capsys, ledger, "--delta", "1e-5", expect=1).err
    ledger.write_bytes(b"")
    assert "empty" in run(capsys, ledger, "--delta", "1e-5", expect=1).err


def test_bad_arguments(ledger: Path, capsys, tmp_path: Path) -> None:
    assert "--delta" in run(capsys, ledger, expect=2).err  # none recorded
    assert "--delta" in run(capsys, ledger, "--delta", "2", expect=2).err
    assert "--accountant" in run(capsys, ledger, "--delta", "1e-5", "--accountant", "gdp", expect=2).err
    assert "does not exist" in run(capsys, tmp_path / "none", expect=1).err
    assert "checksums.json" in run(capsys, tmp_path, expect=1).err
    (tmp_path / "x.txt").write_text("hello")
    assert "not a weightclip ledger" in run(capsys, tmp_path / "x.txt", "--delta", "1e-5", expect=1).err
    made = started(None)
    made.engine.save(tmp_path / "saved")
    assert "checkpoint of an engine" in run(capsys, tmp_path / "saved", expect=1).err


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    made = LipDPClassifier(epsilon=2.0, epochs=1, random_state=0, accountant="rdp").fit(X, X[:, 0] > 0)
    folder = tmp_path_factory.mktemp("models") / "model"
    made.save(folder)
    return folder


def altered(fitted: Path, to: Path, change, card: bool = True) -> Path:
    """A copy of a model whose report was changed by somebody who also mended checksums, and the card if asked."""
    from weightclip.tabular._report import model_card

    to.mkdir()
    contents = {p.name: p.read_bytes() for p in fitted.iterdir()}
    report = json.loads(contents["privacy.json"])
    change(report)
    contents["privacy.json"] = json.dumps(report).encode()
    if card:
        contents["README.md"] = model_card(json.loads(contents["pipeline.json"]), report).encode()
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items() if name != "checksums.json"}
    contents["checksums.json"] = json.dumps(sums).encode()
    for name, data in contents.items():
        (to / name).write_bytes(data)
    return to


def test_a_model_folder(fitted: Path, capsys) -> None:
    report = json.loads((fitted / "privacy.json").read_text())
    shown = run(capsys, fitted).out.splitlines()
    assert "which is true" in shown[0] and shown[-1] == "ok"
    found = json.loads(run(capsys, fitted, "--json").out)
    assert found["epsilon"] == pytest.approx(report["epsilon"], rel=1e-9) and found["delta"] == report["delta"]
    tighter = json.loads(run(capsys, fitted, "--accountant", "pld", "--json").out)
    assert tighter["epsilon"] < found["epsilon"]
    smaller = json.loads(run(capsys, fitted, "--delta", report["delta"] / 10, "--json").out)
    assert smaller["epsilon"] > found["epsilon"] and smaller["claimed"] == report["epsilon"]


def test_what_was_changed_in_a_model_is_found(fitted: Path, capsys, tmp_path: Path) -> None:
    def smaller(report) -> None:
        report["epsilon"] *= 1 - 1e-5

    def fewer(report) -> None:
        report["mechanisms"][-1]["steps"] -= 1

    def larger(report) -> None:
        report["mechanisms"][-1]["sigma"] *= 1.001

    def alone(report) -> None:
        report["mechanisms"][0]["epsilon"] = 0.01

    def unpaid(report) -> None:
        report["preprocessing"].append("NOT PRIVATE: something")

    for i, change in enumerate((smaller, fewer, larger, alone, unpaid)):
        folder = altered(fitted, tmp_path / str(i), change)
        assert "claims epsilon" in run(capsys, folder, expect=1).err

    def statement(report) -> None:
        report["statement"] = report["statement"].replace("(", "(0", 1)

    words = altered(fitted, tmp_path / "words", statement)
    stale = altered(fitted, tmp_path / "card", lambda report: report["not_covered"].pop(), card=False)
    for folder in (words, stale):
        assert "does not say what its report says" in run(capsys, folder, expect=1).err
    gone = altered(fitted, tmp_path / "gone", lambda report: report.pop("mechanisms"), card=False)
    assert "not complete" in run(capsys, gone, expect=1).err
    plain = altered(fitted, tmp_path / "plain", lambda report: None)
    (plain / "privacy.json").write_text("{}")
    assert "was changed after training" in run(capsys, plain, expect=1).err


@pytest.fixture(scope="module")
def stated(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("reports") / "run.ledger"
    for sigma, count in ((1.0, 3), (2.0, 2)):
        made = started(path, sigma=sigma, accountant="pld")
        steps(made, count)
        killed(made)
    made = started(path, sigma=4.0, accountant="pld")
    return json.loads(json.dumps(made.engine.report(1e-5)))


def test_a_report_by_itself(stated, capsys, tmp_path: Path) -> None:
    """From the mechanisms by dp-accounting alone, to 1e-6."""
    path = tmp_path / "privacy.json"
    path.write_text(json.dumps(stated))
    found = json.loads(run(capsys, path, "--json").out)
    assert found["epsilon"] == pytest.approx(epsilon(TRUTH, 1e-5), rel=1e-6) == pytest.approx(stated["epsilon"])
    assert run(capsys, path).out.splitlines()[-1] == "ok"
    assert json.loads(run(capsys, path, "--delta", "1e-6", "--json").out)["epsilon"] > found["epsilon"]


@pytest.mark.parametrize(
    "place, value, text",
    [
        (("epsilon",), 1.0, "claims epsilon"),
        (("epsilon",), "inf", "claims epsilon"),
        (("mechanisms", 0, "sigma"), 1.001, "claims epsilon"),
        (("mechanisms", 1, "steps"), 1, "claims epsilon"),
        (("mechanisms", 0, "epsilon"), 0.1, "claims epsilon"),
        (("public", "steps"), 4, "speaks of 4 steps"),
        (("delta",), 1e-4, "claims epsilon"),
        (("accountant",), "rdp", "claims epsilon"),
        (("adjacency",), "REPLACE_ONE", "claims epsilon"),
        (("adjacency",), "NONE", "no complete privacy report"),
        (("mechanisms",), 3, "no complete privacy report"),
        (("format",), "9.0", "use the version"),
        (("preprocessing",), [], "model folder it belongs to"),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else None,
)
def test_what_was_changed_in_a_report_is_found(stated, place, value, text, capsys, tmp_path: Path) -> None:
    report = json.loads(json.dumps(stated))
    entry = report
    for step in place[:-1]:
        entry = entry[step]
    entry[place[-1]] = value
    (tmp_path / "privacy.json").write_text(json.dumps(report))
    assert text in run(capsys, tmp_path / "privacy.json", expect=1).err


def test_a_file_that_is_no_report(capsys, tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"epsilon": NaN}', "\xff"):
        (tmp_path / "x.json").write_text(text)
        assert "no complete privacy report" in run(capsys, tmp_path / "x.json", expect=1).err


def test_a_model_of_version_01_says_which_version_to_use(fitted: Path, capsys, tmp_path: Path) -> None:
    folder = altered(fitted, tmp_path / "old", lambda report: report.pop("format"), card=False)
    assert "use that version" in run(capsys, folder, expect=1).err


def test_progress_only_where_it_takes_long(capsys, monkeypatch) -> None:
    before = threading.active_count()
    with _verify._patience("waiting"):
        pass
    assert capsys.readouterr().err == "" and threading.active_count() == before
    started_at = []

    class Soon(threading.Timer):
        def __init__(self, interval, function) -> None:
            started_at.append(interval)
            super().__init__(0.0, function)

    monkeypatch.setattr(threading, "Timer", Soon)
    with _verify._patience("waiting"):
        pass
    assert started_at == [2.0]
