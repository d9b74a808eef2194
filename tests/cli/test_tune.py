"""``weightclip tune``: a table in, the model of a paid search out."""

from __future__ import annotations

import json

import numpy as np
import pytest

from weightclip.cli import main


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["tune", *map(str, arguments)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(900, 2))
    lines = [f"{a:.4f},{b:.4f},{'yes' if a + b > 0 else 'no'}" for a, b in x]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["a,b,y", *lines, ""]))
    return path


def test_the_winner_is_a_model_folder_that_verifies(table, tmp_path, capsys):
    out = tmp_path / "model"
    options = ("--target", "y", "--epsilon", "3", "--mean-runs", "2", "--epochs", "3", "--out", out)
    assert run(table, *options, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["epsilon"] <= 3 and report["search"]["mean_runs"] == 2 and report["secure_noise"]
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(out)])
    assert stop.value.code == 0 and "which is true" in capsys.readouterr().out
    assert "best of 2 such runs on average" in (out / "README.md").read_text()
    assert run(table, *options) == 1 and "exists already" in capsys.readouterr().err


def test_a_report_that_leaves_out_its_search_is_caught(table, tmp_path, capsys):
    import hashlib

    out = tmp_path / "model"
    assert run(table, "--target", "y", "--epsilon", 3, "--mean-runs", 2, "--epochs", 1, "--out", out) == 0
    sums = json.loads((out / "checksums.json").read_text())
    report = json.loads((out / "privacy.json").read_text())
    del report["search"]
    (out / "privacy.json").write_text(json.dumps(report))
    sums["privacy.json"] = hashlib.sha256((out / "privacy.json").read_bytes()).hexdigest()
    (out / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(out)])
    assert stop.value.code == 1 and "amount to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--epsilon", "nan"), "--epsilon"),
        (("--epsilon", "0"), "--epsilon"),
        (("--mean-runs", "1"), "--mean-runs"),
        (("--mean-runs", "nan"), "--mean-runs"),
        (("--score-noise", "-1"), "--score-noise"),
        (("--task", "regression"), "--target-range"),
        (("--target", "z"), "z"),
        (("--seed", "-1"), "--seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_options_are_named_in_one_line(options, named, table, tmp_path, capsys):
    assert run(table, "--target", "y", "--epsilon", "1", "--out", tmp_path / "m", *options) in (1, 2)
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error and named in error
    assert not (tmp_path / "m").exists()
