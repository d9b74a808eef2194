"""Checkpoints that somebody else wrote, changed or is writing: one line or a whole checkpoint, never half of one."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine_kit import Run, mlp, private, same_bits, table

import weightclip as wc
from weightclip.engine import _checkpoint


def started() -> Run:
    return private(mlp(), table(24), seed=3, batch=6, sigma=1.0, bounds=wc.Bounds(input_radius=1.0, refresh=4),
                   optimizer=lambda p: torch.optim.AdamW(p, lr=0.05))  # fmt: skip


def stepped(run: Run) -> Run:
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        break
    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "run"
    stepped(started()).engine.save(folder)
    return folder


def resealed(saved: Path, folder: Path, change) -> Path:
    """A copy, changed on purpose, with a checksum to match."""
    folder.mkdir()
    book = json.loads((saved / "ledger.json").read_text())
    tensors = load_file(saved / book["weights"])
    change(book, tensors)
    weights = folder / "weights-0.safetensors"
    save_file(tensors, weights)
    book["weights"] = weights.name
    book["checksum"] = _checkpoint._checksum(book["ledger"], weights)
    (folder / "ledger.json").write_text(json.dumps(book))
    return folder


def put(*path, value):
    """Sets a place of the ledger; a missing value removes it."""

    def change(book, _):
        entry = book["ledger"]
        for step in path[:-1]:
            entry = entry[step]
        if value is None:
            del entry[path[-1]]
        else:
            entry[path[-1]] = value

    return change


def poison(book, tensors):
    tensors["model.0.weight"][0, 0] = torch.nan


TAMPERED = {
    "steps below zero": put("steps", value=-5),
    "fewer steps in runs": put("runs", value={}),
    "negative steps in runs": put("runs", value={"a": 9, "b": -5}),
    "runs as a list": put("runs", value=[1]),
    "steps as text": put("steps", value="3"),
    "half a step": put("steps", value=1.5),
    "a true step": put("steps", value=True),
    "too many steps": put("steps", value=10**30),
    "no steps": put("steps", value=None),
    "draws below zero": put("draws", value=-1),
    "no draws": put("draws", value=None),
    "resumed as a list": put("resumed", value=[1]),
    "no resumed": put("resumed", value=None),
    "settings as text": put("settings", value="none"),
    "no noise multiplier": put("settings", "noise_multiplier", value=None),
    "other noise multiplier": put("settings", "noise_multiplier", value={"a": 1}),
    "gains as a list": put("gains", value=[1, 2]),
    "gains of no type": put("gains", "numerics", value=["torch.load", 0.0]),
    "gains of no layer": put("gains", "gain", value={"nowhere": 1.0}),
    "no gains": put("gains", value=None),
    "quantiles as text": put("quantiles", value="abc"),
    "quantiles of text": put("quantiles", value={"0": ["a"]}),
    "optimizer as text": put("optimizer", value="Adam"),
    "optimizer of no shape": put("optimizer", value={"__dict__": [["state", {"__other__": 1}]]}),
    "optimizer without pairs": put("optimizer", value={"__dict__": [1, 2]}),
    "optimizer without its tensor": put("optimizer", value={"__dict__": [["state", {"__tensor__": "nowhere"}]]}),
    "optimizer without groups": put("optimizer", value={"__dict__": []}),
    "streams as a number": put("streams", value=5),
    "streams without a seed": put("streams", value={"path": []}),
    "streams with a bad path": put("streams", value={"seed": 3, "path": ["x"]}),
    "data as a number": put("data", value=7),
    "an empty ledger": lambda book, _: book.update(ledger={}),
    "a ledger of text": lambda book, _: book.update(ledger="x"),
    "weights that are not finite": poison,
    "no weights": lambda _, tensors: [tensors.pop(k) for k in list(tensors) if k.startswith("model.")],
    "other weights": lambda _, tensors: tensors.update({"model.0.weight": torch.zeros(2, 2)}),
    "no random state": lambda _, tensors: tensors.pop("random.cpu"),
    "a random state of no use": lambda _, tensors: tensors.update({"random.cpu": torch.zeros(3, dtype=torch.uint8)}),
    "format as a list": lambda book, _: book.update(format=[2]),
}


@pytest.mark.parametrize("name", TAMPERED)
@pytest.mark.parametrize("exact", [True, False])
def test_made_up_checkpoints_are_refused_in_one_line(saved: Path, tmp_path: Path, name: str, exact: bool) -> None:
    folder = resealed(saved, tmp_path / "run", TAMPERED[name])
    fresh = started()
    before = fresh.weights()
    with pytest.raises(wc.WeightclipError) as error:
        fresh.engine.load(folder, exact=exact)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert fresh.engine.steps == 0 and same_bits(before, fresh.weights())


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, '{"format": 2}', '{"format": 2, "weights": 5}',
                                  "\x00", '{"format": 2, "weights": "../../etc/passwd", "ledger": {}, "checksum": ""}'],
                         ids=range(9))  # fmt: skip
def test_a_ledger_of_anything_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "ledger.json").write_text(text)
    with pytest.raises(wc.WeightclipError, match="cannot read the checkpoint") as error:
        started().engine.load(tmp_path)
    assert "\n" not in str(error.value)


def test_weights_of_anything_are_refused_in_one_line(saved: Path, tmp_path: Path) -> None:
    folder = resealed(saved, tmp_path / "run", lambda *_: None)
    book = json.loads((folder / "ledger.json").read_text())
    weights = folder / book["weights"]
    for data in (b"", b"\x80\x04K\x01.", b"\xff" * 100, weights.read_bytes()[:50]):
        weights.write_bytes(data)
        book["checksum"] = _checkpoint._checksum(book["ledger"], weights)
        (folder / "ledger.json").write_text(json.dumps(book))
        with pytest.raises(wc.WeightclipError, match="cannot read the checkpoint") as error:
            started().engine.load(folder)
        assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:resumed without a ledger")
@pytest.mark.skipif(os.name == "nt", reason="locks of its own")
def test_two_processes_on_one_folder_do_not_delete_each_others_weights(tmp_path: Path, monkeypatch) -> None:
    """One save is caught between writing its weights and naming them, while another one runs."""
    folder = tmp_path / "run"
    first, second = stepped(started()), stepped(stepped(started()))
    first.engine.save(folder)
    other = threading.Thread(target=second.engine.save, args=(folder,))
    real, caught = os.replace, []

    def replace(a, b):
        if not caught:
            caught.append(True)
            other.start()
            other.join(timeout=1.0)  # without turns it is done within this second
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    first.engine.save(folder)
    other.join()
    fresh = started()
    fresh.engine.load(folder)
    assert fresh.engine.steps in (1, 2) and len(list(folder.iterdir())) == 2


@pytest.mark.filterwarnings("ignore:resumed without a ledger")
def test_a_reader_that_is_overtaken_reads_again(saved: Path, tmp_path: Path, monkeypatch) -> None:
    run = stepped(started())
    run.engine.save(tmp_path / "run")
    real, caught = _checkpoint._checksum, []

    def checksum(ledger, weights, *more):
        if not caught:
            caught.append(True)
            run.engine.save(tmp_path / "run")
        return real(ledger, weights, *more)

    fresh = started()
    monkeypatch.setattr(_checkpoint, "_checksum", checksum)
    fresh.engine.load(tmp_path / "run")
    assert fresh.engine.steps == 1
