"""Hostile model folders: damaged, or changed on purpose with checksums to match."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from tests.hostile.kit import Case

FILES = ("weights.safetensors", "pipeline.json", "privacy.json", "README.md", "checksums.json")
GONE = object()


def seal(model: Path) -> None:
    """Checksums to match what the folder holds."""
    sums = {n: hashlib.sha256((model / n).read_bytes()).hexdigest() for n in FILES if n != "checksums.json"}
    (model / "checksums.json").write_text(json.dumps(sums))


def put(file: str, path: tuple[Any, ...], value: Any) -> Callable[[Path], None]:
    """Sets one place of a JSON file and seals the folder; GONE removes it."""

    def change(folder: Path) -> None:
        place = folder / "model" / f"{file}.json"
        data = json.loads(place.read_text())
        entry = data
        for step in path[:-1]:
            entry = entry[step]
        if value is GONE:
            del entry[path[-1]]
        else:
            entry[path[-1]] = value
        place.write_text(json.dumps(data))
        seal(folder / "model")

    return change


def text(file: str, contents: str) -> Callable[[Path], None]:
    """Puts other contents into a file and seals the folder."""

    def change(folder: Path) -> None:
        (folder / "model" / file).write_text(contents)
        seal(folder / "model")

    return change


def weights(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    """Changes the weights and seals the folder."""

    def apply(folder: Path) -> None:
        path = folder / "model" / "weights.safetensors"
        tensors = safetensors.numpy.load(path.read_bytes())
        change(tensors)
        path.write_bytes(safetensors.numpy.save(tensors))
        seal(folder / "model")

    return apply


def _pipe(folder: Path) -> None:
    (folder / "model" / "privacy.json").unlink()
    os.mkfifo(folder / "model" / "privacy.json")


def _folder(folder: Path) -> None:
    (folder / "model" / "pipeline.json").unlink()
    (folder / "model" / "pipeline.json").mkdir()


PIPELINE: tuple[tuple[tuple[Any, ...], Any], ...] = (
    (("format",), 99), (("format",), GONE), (("format",), True), (("format",), "1"),
    (("task",), "ranking"), (("task",), GONE), (("task",), "regression"), (("target",), 5), (("target",), GONE),
    (("columns",), "ab"), (("columns",), []), (("columns",), GONE), (("columns",), [5]), (("columns",), [[]]),
    (("columns", 0), {}), (("columns", 0, "name"), 5), (("columns", 0, "name"), "b"), (("columns", 0, "type"), "text"),
    (("columns", 0, "type"), "categorical"), (("columns", 0, "edges"), []), (("columns", 0, "edges"), [1]),
    (("columns", 0, "edges"), [2, 1]), (("columns", 0, "edges"), ["0", "1"]), (("columns", 0, "edges"), GONE),
    (("columns", 0, "edges"), "__import__('os')"), (("columns", 0, "missing"), 1), (("columns", 0, "missing"), GONE),
    (("columns", 0, "low"), 5), (("columns", 0, "extra"), 1), (("columns", 1, "codes"), [-1]),
    (("columns", 1, "codes"), [10**9]), (("columns", 1, "codes"), [2, 1]), (("columns", 1, "codes"), [0.5]),
    (("columns", 1, "codes"), GONE), (("columns", 1, "categories"), [1, 2]),
    (("shift",), []), (("shift",), GONE), (("shift", "center"), [0.0]), (("shift", "center"), ["a"]),
    (("shift", "gain"), 0), (("shift", "gain"), "1"), (("shift", "radius"), -1), (("shift", "radius"), GONE),
    (("hidden",), [-1]), (("hidden",), [3, 3]), (("hidden",), "none"), (("hidden",), [10**12]), (("hidden",), GONE),
    (("outputs",), 0), (("outputs",), 2), (("outputs",), "1"), (("outputs",), 10**15), (("outputs",), GONE),
    (("classes",), []), (("classes",), ["yes"]), (("classes",), ["yes", "yes"]), (("classes",), ["a", "b", "c"]),
    (("classes",), [None, "a"]), (("classes",), [["a"], ["b"]]), (("classes",), 5), (("classes",), GONE),
    (("target_range",), [1, 0]), (("target_range",), [0]), (("target_range",), ["0", "1"]), (("target_range",), GONE),
    (("inputs",), ["z"]), (("inputs",), 5), (("inputs",), ["a", "a", "b"]), (("named",), "yes"),
)  # fmt: skip

PRIVACY: tuple[tuple[tuple[Any, ...], Any], ...] = (
    (("epsilon",), "nan"), (("epsilon",), -1), (("epsilon",), None), (("epsilon",), True), (("epsilon",), 0.5),
    (("epsilon",), GONE), (("delta",), 0), (("delta",), 2), (("delta",), "1e-5"), (("delta",), GONE),
    (("target_epsilon",), GONE), (("target_epsilon",), -3), (("statement",), 5), (("accountant",), "trust me"),
    (("accountant",), GONE), (("adjacency",), "NONE"), (("adjacency",), 5), (("mechanisms",), []), (("mechanisms",), 5),
    (("mechanisms",), [5]), (("mechanisms", 0), {}), (("mechanisms", 0, "kind"), "laplace"),
    (("mechanisms", 0, "sigma"), -1), (("mechanisms", 0, "sigma"), "big"), (("mechanisms", 0, "sigma"), 0),
    (("mechanisms", 0, "sigma"), None), (("mechanisms", 0, "q"), 0), (("mechanisms", 0, "q"), 2),
    (("mechanisms", 0, "steps"), -5), (("mechanisms", 0, "steps"), 1.5), (("mechanisms", 0, "steps"), GONE),
    (("preprocessing",), 5), (("preprocessing",), [1]), (("not_covered",), GONE), (("public",), []),
    (("public", "records"), 0), (("public", "records"), "many"), (("public", "steps"), -5), (("public", "steps"), 7),
    (("public", "sample_rate"), 3), (("public", "settings"), GONE), (("public", "settings"), []),
    (("public", "settings", "temperature"), 0), (("public", "settings", "temperature"), GONE),
    (("public", "settings", "joint_cap"), []), (("public", "settings", "bias_scale"), "x"),
    (("layers",), []), (("layers",), GONE), (("layers", 0), 5), (("layers", 0, "noise"), 1e-9),
    (("layers", 0, "noise"), "x"), (("layers", 0, "sensitivity"), 0), (("layers", 0, "sensitivity"), GONE),
)  # fmt: skip

WEIGHTS: tuple[tuple[str, Callable[[dict[str, np.ndarray]], object]], ...] = (
    ("NaN", lambda w: w["layers.0.weight"].fill(np.nan)),
    ("infinite", lambda w: w["layers.0.bias"].fill(np.inf)),
    ("double", lambda w: w.update({"layers.0.weight": w["layers.0.weight"].astype(np.float64)})),
    ("whole numbers", lambda w: w.update({"layers.0.bias": w["layers.0.bias"].astype(np.int64)})),
    ("another shape", lambda w: w.update({"layers.0.weight": np.zeros((3, 3), np.float32)})),
    ("no dimension", lambda w: w.update({"layers.0.weight": np.zeros((), np.float32)})),
    ("a layer gone", lambda w: w.pop("layers.0.bias")),
    ("all gone", lambda w: w.clear()),
    ("other names", lambda w: w.update({"x": w.pop("layers.0.weight")})),
)


def _name(file: str, path: tuple[Any, ...], value: Any) -> str:
    shown = "gone" if value is GONE else repr(value)[:25]
    return f"{file}: {'.'.join(map(str, path))} = {shown}"


def _both(name: str, prepare: Callable[[Path], object], match: str = "model") -> tuple[Case, ...]:
    """The file may only be wrong for one of the two commands; a wrong privacy report must not pass certify."""
    return (Case(f"certify: {name}", ("certify", "{model}"), match, prepare),)


CASES = (
    *(c for p, v in PIPELINE for c in _both(_name("pipeline", p, v), put("pipeline", p, v), "")),
    *(c for p, v in PRIVACY for c in _both(_name("privacy", p, v), put("privacy", p, v))),
    *(c for n, change in WEIGHTS for c in _both(f"weights: {n}", weights(change), "")),
    *(
        Case(f"predict: {file} is gone", ("predict", "{model}", "{data}"), f"cannot read {file}",
             lambda d, file=file: (d / "model" / file).unlink())
        for file in FILES
    ),
    *(
        Case(f"certify: {file} has one byte more", ("certify", "{model}"), file,
             lambda d, file=file: (d / "model" / file).write_bytes((d / "model" / file).read_bytes() + b"1"))
        for file in FILES
    ),
    *(
        Case(f"predict: {file} holds {what}", ("predict", "{model}", "{data}"), file, text(file, contents))
        for file in ("pipeline.json", "privacy.json")
        for what, contents in (("nothing", ""), ("a list", "[]"), ("NaN", '{"epsilon": NaN}'), ("depth", "[" * 99_999))
    ),
    Case("certify: weights are a pickle", ("certify", "{model}"), "safetensors", text("weights.safetensors", "\x80K.")),
    Case("certify: weights are nothing", ("certify", "{model}"), "safetensors", text("weights.safetensors", "")),
    Case("certify: checksums are a list", ("certify", "{model}"), "checksums.json",
         lambda d: (d / "model" / "checksums.json").write_text("[]")),
    Case("certify: checksums are empty", ("certify", "{model}"), "was changed",
         lambda d: (d / "model" / "checksums.json").write_text("{}")),
    Case("predict: a pipe in the folder", ("predict", "{model}", "{data}"), "no regular file", _pipe),
    Case("predict: a folder in the folder", ("predict", "{model}", "{data}"), "no regular file", _folder),
)  # fmt: skip
