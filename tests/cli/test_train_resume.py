"""``weightclip train --ledger --resume``, killed again and again: every release is charged, and epsilon is the total.

Six kills run always, sixty with WEIGHTCLIP_FULL=1.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import weightclip
from weightclip.accounting._ledger_format import read
from weightclip.cli import main
from weightclip.tabular._estimators import LipDPClassifier, LipDPRegressor

KILLS = 60 if os.environ.get("WEIGHTCLIP_FULL") == "1" else 6
EPSILON, DELTA = 2.0, 1e-5
RNG = np.random.default_rng(0)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
Order = Callable[..., int]


@pytest.fixture(scope="module")
def order(tmp_path_factory) -> Iterator[tuple[Path, Order]]:
    """A folder, and a function that runs a command line in a process of its own: its exit status."""
    folder = tmp_path_factory.mktemp("resume")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("resume_child.py")), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(weightclip.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    write, answer = process.stdin, process.stdout

    def run(arguments: list[str], last: int = 0, before: bool = False) -> int:
        print(json.dumps({"arguments": arguments, "last": last, "before": before}), file=write, flush=True)
        return int(answer.readline())

    yield folder, run
    write.close()
    process.wait(timeout=60)
    answer.close()


def command(folder: Path, name: str, task: str, *more: str) -> list[str]:
    a, b = RNG.normal(size=400), RNG.uniform(size=400)
    label = np.where(a + b > 0.5, "yes", "no") if task == "classification" else 3 * a + b
    rows = "".join(f"{x},{y},{z}\n" for x, y, z in zip(a, b, label, strict=True))
    (folder / f"{name}.csv").write_text("a,b,label\n" + rows)
    return ["train", str(folder / f"{name}.csv"), "--target", "label", "--epsilon", str(EPSILON), "--delta", str(DELTA),
            "--accountant", "rdp", "--epochs", "3", "--task", task, "--out", str(folder / name),
            "--ledger", str(folder / f"{name}.ledger"), *more]  # fmt: skip


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_every_release_of_a_killed_and_resumed_training_is_charged(order, task):
    folder, run = order
    rng = random.Random()
    # one while statistics are released, one early in the training, then some on the way
    moments = [2, 10, *(rng.randint(1, 6) for _ in range(KILLS // 2 - 2))]
    train, ledger = command(folder, task, task), folder / f"{task}.ledger"
    (folder / "released").unlink(missing_ok=True)
    died = 0
    for kill, last in enumerate(moments):
        again = [*train, "--resume"] if kill else train
        status = run(again, last=last, before=rng.random() < 0.5)
        assert status == -9 or (status == 0 and kill > 3), (folder / "said").read_text()
        died += status == -9
        released = (folder / "released").stat().st_size if (folder / "released").exists() else 0
        assert read(ledger).charges >= released
        if status == 0:
            break
        assert not (folder / task).exists()
    if not (folder / task).exists():
        assert run(train) != 0 and "--resume" in (folder / "said").read_text()  # not by accident
        assert run([*train, "--epochs", "4", "--resume"]) != 0 and "other options" in (folder / "said").read_text()
        assert run([*train, "--resume"]) == 0, (folder / "said").read_text()
    book, report = read(ledger), json.loads((folder / task / "privacy.json").read_text())
    assert book.charges >= (folder / "released").stat().st_size and died >= 3
    assert report["epsilon"] <= EPSILON * (1 + 1e-9)
    # the model claims all that the ledger holds, and the two agree
    assert sum(m["steps"] for m in report["mechanisms"]) == book.charges
    assert book.epsilon(DELTA, "rdp") == pytest.approx(report["epsilon"], rel=1e-9)
    assert not Path(f"{folder / task}.resume").exists() and not (folder / "failed").exists()


def test_what_does_not_go_together(tmp_path, capsys):
    (tmp_path / "d.csv").write_text("a,label\n" + "".join(f"{i},{i % 2}\n" for i in range(50)))
    base = ["train", str(tmp_path / "d.csv"), "--target", "label", "--epsilon", "1", "--out", str(tmp_path / "m")]
    for more, said in (
        (["--resume"], "--resume needs --ledger"),
        (["--ledger", str(tmp_path / "l"), "--non-private-scaling"], "exclude each other"),
        (["--ledger", str(tmp_path)], "cannot use the ledger"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([*base, *more])
        captured = capsys.readouterr().err
        assert caught.value.code != 0 and said in captured and len(captured.strip().splitlines()) == 1


@pytest.mark.parametrize("kind", [LipDPClassifier, LipDPRegressor])
def test_fits_on_one_ledger_share_epsilon(kind, tmp_path):
    X = RNG.uniform(-1, 1, (300, 2))
    y = (X[:, 0] > 0).astype(int) if kind is LipDPClassifier else X[:, 0]
    settings = {"delta": DELTA, "accountant": "rdp", "epochs": 1, "random_state": 0, "ledger": tmp_path / "fits.ledger"}
    first = kind(1.0, **settings).fit(X, y)
    charges = read(tmp_path / "fits.ledger").charges
    assert sum(m["steps"] for m in first.privacy_report_["mechanisms"]) == charges
    second = kind(2.0, **settings).fit(X, y)
    book = read(tmp_path / "fits.ledger")
    assert book.charges > charges and first.epsilon_ <= 1.0 < second.epsilon_ <= 2.0
    assert book.epsilon(DELTA, "rdp") == pytest.approx(second.epsilon_, rel=1e-9)
    with pytest.raises(weightclip.BudgetSpent, match="nothing is left of epsilon 2"):
        kind(2.0, **settings).fit(X, y)
    assert read(tmp_path / "fits.ledger").charges == book.charges  # refused before anything was read
