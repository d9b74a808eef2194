"""The tutorials run, and print what they say they print."""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path

import pytest
from tests import text_kit

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capfd.readouterr().out


def test_first_private_model(monkeypatch, capfd, tmp_path):
    pytest.importorskip("pandas")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = run("first_private_model.py", "3000", monkeypatch=monkeypatch, capfd=capfd)
    assert "files          unchanged" in out and "-differentially private" in out
    assert float(out.split("to show): ")[1].split()[0]) > 0.75
    assert 0.98 < float(out.split("\nepsilon ")[-1].split()[0]) <= 1.0


def test_from_opacus(monkeypatch, capfd):
    out = run("from_opacus.py", "1", monkeypatch=monkeypatch, capfd=capfd)
    assert "weightclip  epsilon" in out and "joint sensitivity" in out


def test_choosing_epsilon(monkeypatch, capfd):
    pytest.importorskip("pandas")
    out = run("choosing_epsilon.py", "1000", monkeypatch=monkeypatch, capfd=capfd)
    assert "epsilon  1.0: at most 73.1% sure" in out
    together, stated = (float(v.strip(",")) for v in out.split("together: ")[1].split()[0:5:4])
    assert together == pytest.approx(stated, abs=1e-3)
    assert float(out.split("about ten: epsilon ")[1].split()[0]) > 1.0


def test_demo(monkeypatch, capfd, tmp_path):
    out = run("demo.py", "--epochs", "1", "--out", str(tmp_path), monkeypatch=monkeypatch, capfd=capfd)
    assert "epsilon" in out and list(tmp_path.glob("*.png"))


def test_transformer(monkeypatch, capfd):
    out = run("transformer.py", "--records", "3000", "--epochs", "1", monkeypatch=monkeypatch, capfd=capfd)
    assert 0 < float(out.split("  epsilon ")[-1].split()[0]) <= 2.0


def test_image_classifier(monkeypatch, capfd):
    out = run("image_classifier.py", "--seed", "1", monkeypatch=monkeypatch, capfd=capfd)
    assert float(out.split("test accuracy ")[1].split("%")[0]) > 85


def test_sentiment(monkeypatch, capfd, tmp_path):
    for package in ("pandas", "peft"):
        pytest.importorskip(package)
    text_kit.install(tmp_path, monkeypatch)
    pick, words = random.Random(0), [["bad", "dull"], ["good", "charming"]]
    for name, n in (("train", 600), ("test", 200)):
        labels = [pick.randrange(2) for _ in range(n)]
        lines = [" ".join(pick.choices(["film", "plot"], k=3) + words[y]) + f"\t{y}\n" for y in labels]
        (tmp_path / name).write_text("sentence\tlabel\n" + "".join(lines))
    files = str(tmp_path / "train"), str(tmp_path / "test")
    out = run("sentiment.py", *files, "tiny", "100", monkeypatch=monkeypatch, capfd=capfd)
    assert float(out.split("accuracy ")[1].split(",")[0]) > 0.8
    assert 7.5 < float(out.split("epsilon ")[1].split()[0]) <= 8.0
