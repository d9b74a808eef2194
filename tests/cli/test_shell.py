"""What the command line does to files that are not its own, and to options that make no sense."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time

import numpy as np
import pytest

from weightclip.cli import main

RNG = np.random.default_rng(0)
N = 300
QUICK = ["--epochs", "1", "--seed", "0", "--accountant", "rdp", "--epsilon", "3", "--delta", "1e-5"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A table and a model folder trained on it."""
    folder = tmp_path_factory.mktemp("shell")
    rows = [(f"{v:.3f}", "yes" if v > 0 else "no") for v in RNG.normal(size=N)]
    (folder / "data.csv").write_text("a,label\n" + "".join(f"{a},{y}\n" for a, y in rows))
    run("train", folder / "data.csv", "--target", "label", "--out", folder / "model", *QUICK)
    return folder


def run(*arguments, expect=0, capsys=None):
    with pytest.raises(SystemExit) as exit:
        main([str(a) for a in arguments])
    captured = capsys.readouterr() if capsys else None
    assert exit.value.code == expect, captured
    return captured


def fails(capsys, *arguments, match):
    lines = run(*arguments, expect=1, capsys=capsys).err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and match in lines[0], lines


def train(made, out, *more):
    return ["train", made / "data.csv", "--target", "label", "--out", out, *QUICK, *more]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_predict_leaves_devices_pipes_and_links_alone(made, tmp_path, capsys):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name, match in (("link", "symbolic link"), ("pipe", "no plain file"), (".", "a folder")):
        fails(capsys, "predict", made / "model", made / "data.csv", "--out", tmp_path / name, match=match)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "precious"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_predict_does_not_write_over_what_it_reads(made, tmp_path, capsys):
    before = (made / "data.csv").read_text()
    fails(
        capsys, "predict", made / "model", made / "data.csv", "--out", made / "data.csv", match="the table that is read"
    )
    assert (made / "data.csv").read_text() == before
    run("predict", made / "model", made / "data.csv", "--out", tmp_path / "p.csv", capsys=capsys)
    run("predict", made / "model", made / "data.csv", "--out", tmp_path / "p.csv", capsys=capsys)  # may be replaced
    assert os.listdir(tmp_path) == ["p.csv"]


def test_overwriting_through_a_link_is_refused_early(made, tmp_path, capsys):
    (tmp_path / "link").symlink_to(made / "model")
    before = (made / "model" / "privacy.json").read_bytes()
    fails(capsys, *train(made, tmp_path / "link", "--overwrite"), match="symbolic link")
    assert (made / "model" / "privacy.json").read_bytes() == before and os.listdir(tmp_path) == ["link"]


@pytest.mark.parametrize("more, match", [
    (["--ignore", "label"], "it is the target"), (["--categorical", "label"], "that is the target"),
    (["--epsilon", "nan"], "--epsilon must be"), (["--epsilon", "inf"], "--epsilon must be"),
    (["--epsilon", "1e-9"], "--epsilon must be at least"), (["--delta", "nan"], "--delta"),
    (["--seed", "-1"], "--seed"), (["--epochs", "nan"], "--epochs"), (["--epochs", "0"], "--epochs"),
    (["--classes", "yes"], "--classes"), (["--classes", ","], "--classes"), (["--delimiter", "ab"], "--delimiter"),
    (["--target-range", "0,1"], "--task regression"), (["--hidden", "999999999"], "--hidden"),
    (["--ignore", "a", "--categorical", "a"], "described and ignored"),
])  # fmt: skip
def test_options_without_sense_are_refused_at_once(made, tmp_path, capsys, more, match):
    started = time.monotonic()
    fails(capsys, *train(made, tmp_path / "m", *more), match=match)
    assert os.listdir(tmp_path) == [] and time.monotonic() - started < 5


def test_a_public_number_of_records(made, tmp_path, capsys):
    out = run(*train(made, tmp_path / "m", "--n-records", "1000", "--json"), capsys=capsys).out
    report = json.loads(out)
    assert report["public"]["records"] == 1000 and report["public"]["expected_batch_size"] == 1.25 * 125
    other = run("train", made / "data.csv", "--target", "label", "--out", tmp_path / "d", "--epsilon", "3", "--epochs",
                "1", "--n-records", "1000", "--json", capsys=capsys)  # fmt: skip
    assert json.loads(other.out)["delta"] == 1e-6
    run(*train(made, tmp_path / "x", "--n-records", "0"), expect=2)


def resealed(made, target, name, change):
    """A copy of the model folder, changed on purpose, with checksums to match."""
    target.mkdir()
    for path in (made / "model").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    text = (target / name).read_text()
    (target / name).write_text(change(text))
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in target.iterdir() if p.name != "checksums.json"}
    (target / "checksums.json").write_text(json.dumps(sums))
    return target


@pytest.mark.parametrize("claim", ["NaN", '"nan"', "-Infinity", "-1", "null", '"-inf"', "1e999", "true", "[]"])
def test_certify_believes_no_epsilon_that_is_no_number(made, tmp_path, capsys, claim):
    real = json.loads((made / "model" / "privacy.json").read_text())["epsilon"]
    folder = resealed(
        made, tmp_path / "m", "privacy.json", lambda t: t.replace(f'"epsilon": {real}', f'"epsilon": {claim}', 1)
    )
    fails(capsys, "certify", folder, match="privacy.json")
    fails(capsys, "predict", folder, made / "data.csv", match="privacy.json")


def test_what_nobody_expected_is_one_line_too(made, tmp_path, capsys, monkeypatch):
    def surprise(*_, **__):
        raise RuntimeError("row 17: 123-45-6789\nsecond line")

    monkeypatch.setattr("weightclip.tabular.files.load", surprise)
    fails(capsys, *train(made, tmp_path / "m"), match="unexpected RuntimeError at test_shell.py:")
    monkeypatch.setenv("WEIGHTCLIP_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main([str(a) for a in train(made, tmp_path / "m")])
