"""What strangers' files must look like before a line of ours relies on it: schemas, pipelines, privacy reports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from weightclip.engine import check_format
from weightclip.errors import WeightclipError

_LARGEST = 1e300  # of a number in a file: far from where arithmetic overflows
_COLUMN = {"name", "type", "low", "high", "categories"}


def strict_json(data: bytes | str) -> Any:
    """JSON as the standard has it, else ValueError: UTF-8, no NaN or infinity, nothing that overflows, no key twice."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    def finite(text: str) -> float:
        value = float(text)
        return value if abs(value) <= _LARGEST else refuse(text[:20])

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({k for k, _ in pairs}) != len(pairs):
            raise ValueError("a key appears twice in one object")
        return dict(pairs)

    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


LEAST_EPSILON = 1e-4


def check_budget(epsilon: float, delta: float | None, one: str = "epsilon", other: str = "delta") -> None:
    """Refuse a budget that is none, or that no accountant resolves; `one` and `other` are their names in errors."""
    if not (isinstance(epsilon, Real) and 0 < epsilon < math.inf):
        raise WeightclipError(f"{one} must be a positive number, got {epsilon!r}.")
    if epsilon < LEAST_EPSILON:
        raise WeightclipError(
            f"{one} must be at least {LEAST_EPSILON:g}: with less nothing is learnt; got {epsilon:g}."
        )
    if delta is not None and not (isinstance(delta, Real) and 0 < delta < 1):
        raise WeightclipError(f"{other} must lie strictly between 0 and 1, got {delta!r}.")
    if delta is not None and not 1e-20 <= delta <= 0.1:
        raise WeightclipError(f"{other} must be from 1e-20 to 0.1 (well below 1/records is usual), got {delta:g}.")


def _number(v: Any) -> bool:
    if isinstance(v, int) and abs(v) > 1 << 900:
        return False  # no float
    return isinstance(v, Real) and not isinstance(v, (bool, np.bool_)) and -_LARGEST <= float(v) <= _LARGEST


def _caps(v: Any) -> bool:
    values = v if isinstance(v, list) else [v]
    return len(values) > 0 and all(_number(t) and t > 0 for t in values)


def _whole(v: Any, least: int = 0) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and least <= v < 1 << 53


def _texts(v: Any) -> bool:
    return isinstance(v, (list, tuple)) and all(isinstance(item, str) for item in v)


def _plain(v: Any) -> bool:
    """A single value: from JSON a text, a number or a truth value; from Python also dates and the like."""
    return _number(v) if isinstance(v, Real) and not isinstance(v, bool) else isinstance(v, Hashable) and v is not None


def _plains(v: Any) -> bool:
    return isinstance(v, (list, tuple)) and all(_plain(item) and not isinstance(item, tuple) for item in v)


def _span(v: Any) -> bool:
    return isinstance(v, (list, tuple)) and len(v) == 2 and all(map(_number, v)) and v[0] <= v[1]


def _text(v: Any) -> bool:
    """How a text column is read: through which encoder, with updates of which rank on how many tokens if any."""
    if not isinstance(v, dict) or set(v) - {"lora"} != {"column", "encoder", "sha256"}:
        return False
    lora = v.get("lora", {"rank": 1, "tokens": 3})
    whole = isinstance(lora, dict) and set(lora) == {"rank", "tokens"} and all(_whole(n, 1) for n in lora.values())
    return whole and 3 <= lora["tokens"] <= 256 and _texts([v[k] for k in ("column", "encoder", "sha256")])


Rule = tuple[Callable[[Any], bool], str]  # what an entry must be, and how an error says so
Rules = Mapping[str, Rule]

_TEXT: Rule = (lambda v: isinstance(v, str), "a text")
_LIST: Rule = (lambda v: isinstance(v, list), "a list")
_OBJECT: Rule = (lambda v: isinstance(v, dict), "an object")
_FLAG: Rule = (lambda v: isinstance(v, bool), "true or false")
_NUMBER: Rule = (_number, "a number")
_POSITIVE: Rule = (lambda v: _number(v) and v > 0, "a positive number")
_AT_LEAST_0: Rule = (lambda v: _number(v) and v >= 0, "a number of at least 0")
_RATE: Rule = (lambda v: _number(v) and 0 < v <= 1, "a number in (0, 1]")
_COUNT: Rule = (_whole, "a whole number of at least 0")
_SIZE: Rule = (lambda v: _whole(v, 1), "a whole number of at least 1")
_NUMBERS: Rule = (lambda v: isinstance(v, list) and all(map(_number, v)), "a list of numbers")
_SENTENCES: Rule = (_texts, "a list of sentences")


def _or_none(rule: Rule) -> Rule:
    return lambda v: v is None or rule[0](v), rule[1]


def _obey(entry: Any, rules: Rules, where: str, optional: frozenset[str] = frozenset()) -> None:
    if not isinstance(entry, Mapping):
        raise WeightclipError(f"{where}: expected an object.")
    for name, (holds, text) in rules.items():
        if name not in entry and name in optional:
            continue
        if name not in entry or not holds(entry[name]):
            raise WeightclipError(f"{where} is not complete or not right: {name!r} must be {text}.")


_SCHEMA: Rules = {
    "columns": (lambda v: isinstance(v, (list, tuple)), 'a list like [{"name": "age", "type": "numeric"}]'),
    "ignore": (_texts, "a list of column names"),
    "classes": (lambda v: _plains(v) and len(v) > 1, "a list of at least two labels"),
    "target_range": (lambda v: _span(v) and v[0] < v[1], "two numbers [low, high] with low < high"),
}
_SCHEMA_COLUMN: Rules = {
    "name": (lambda v: isinstance(v, (str, int)) and not isinstance(v, bool), "the column's name"),
    "type": _TEXT, "low": _NUMBER, "high": _NUMBER,
    "categories": (_plains, "a list of texts, numbers or truth values"),
}  # fmt: skip


def check_schema(data: Any) -> None:
    """Refuse, in one line, a schema of the wrong shape; `Schema` and `Column` check what it means."""
    if isinstance(data, Mapping) and (unknown := sorted(map(str, set(data) - set(_SCHEMA)))):
        raise WeightclipError(f"schema: unknown entry {unknown[0]!r}.")
    _obey(data, _SCHEMA, "schema", frozenset(_SCHEMA))
    for i, column in enumerate(data.get("columns", ())):
        if not isinstance(column, Mapping) or set(column) - _COLUMN or not {"name", "type"} <= set(column):
            raise WeightclipError(
                f"schema: column {i + 1} needs 'name' and 'type' and may have 'low', 'high' or 'categories'."
            )
        _obey(column, _SCHEMA_COLUMN, f"schema: column {i + 1}", frozenset(_SCHEMA_COLUMN))
    named = [str(c["name"]) for c in data.get("columns", ())]
    if both := set(named) & set(data.get("ignore", ())):
        raise WeightclipError(f"schema: column {min(both)!r} is described and ignored: choose one.")


_REPORT: Rules = {
    "statement": _TEXT,
    "epsilon": (lambda v: v == "inf" or (_number(v) and v >= 0), 'a number of at least 0, or "inf"'),
    "delta": (lambda v: _number(v) and 0 < v < 1, "a number between 0 and 1"),
    "target_epsilon": _POSITIVE,
    "accountant": (lambda v: v in ("pld", "rdp"), '"pld" or "rdp"'),
    "adjacency": (lambda v: v == "ADD_OR_REMOVE_ONE", '"ADD_OR_REMOVE_ONE"'),
    "mechanisms": _LIST, "preprocessing": _SENTENCES, "not_covered": _SENTENCES, "public": _OBJECT,
    "layers": (lambda v: isinstance(v, list) and len(v) > 0, "a list of layers"),
    "search": _OBJECT,
}  # fmt: skip
_SEARCH: Rules = {"mean_runs": (lambda v: _number(v) and v > 1, "a number above 1"), "score": _NUMBER}
_MECHANISM: Rules = {
    "kind": (lambda v: v in ("gaussian", "pure"), '"gaussian" or "pure"'),
    "sigma": _or_none(_AT_LEAST_0), "q": _RATE, "steps": _COUNT, "epsilon0": _or_none(_AT_LEAST_0),
}  # fmt: skip
_PUBLIC: Rules = {"records": _SIZE, "steps": _COUNT, "sample_rate": _RATE, "settings": _OBJECT}
_LAYER: Rules = {"name": _TEXT, "parameters": _SIZE, "sensitivity": _POSITIVE, "noise": _AT_LEAST_0}
_SETTINGS: Rules = {
    "temperature": _POSITIVE, "cap": _or_none(_POSITIVE), "bias_scale": _POSITIVE, "weight_norm": _or_none(_POSITIVE),
    "joint_cap": _or_none((_caps, "a positive number, or one for each layer")),
}  # fmt: skip


def check_report(report: Any, where: str) -> None:
    """Refuse, in one line, a privacy report of the wrong shape; whether it is true is for `certify` to find out."""
    _obey(report, _REPORT, where, frozenset({"search"}))
    check_format(report)
    if "search" in report:
        _obey(report["search"], _SEARCH, f"{where}: 'search'")
    for i, m in enumerate(report["mechanisms"]):
        _obey(m, _MECHANISM, f"{where}: mechanism {i + 1}", frozenset({"epsilon0"}))
    _obey(report["public"], _PUBLIC, f"{where}: 'public'")
    _obey(report["public"]["settings"], _SETTINGS, f"{where}: 'settings'")
    for i, layer in enumerate(report["layers"]):
        _obey(layer, _LAYER, f"{where}: layer {i + 1}")


_PIPELINE: Rules = {
    "task": (lambda v: v in ("classification", "regression"), '"classification" or "regression"'),
    "target": _TEXT, "columns": _LIST, "shift": _OBJECT,
    "hidden": (lambda v: isinstance(v, list) and all(_whole(w, 1) for w in v), "a list of widths"),
    "outputs": _SIZE,
    "classes": (_plains, "a list of labels"),
    "target_range": (_span, "two numbers [low, high]"),
    "named": _FLAG,
    "text": (_text, "an object with column, encoder and sha256 (and rank and tokens of a lora)"),
    "inputs": (lambda v: v is None or (_texts(v) and len(set(v)) == len(v)), "a list of column names"),
}  # fmt: skip
_SHIFT: Rules = {"center": _NUMBERS, "gain": _POSITIVE, "radius": _POSITIVE}
_PART: Rules = {
    "name": _TEXT, "type": _TEXT, "low": _NUMBER, "high": _NUMBER, "categories": (_texts, "a list of texts"),
    "edges": _NUMBERS, "missing": _FLAG,
    "codes": (lambda v: isinstance(v, list) and all(map(_whole, v)), "a list of whole numbers"),
}  # fmt: skip


def check_pipeline(pipeline: Any, weights: Mapping[str, np.ndarray], where: str) -> None:
    """Refuse, in one line, a pipeline of the wrong shape, or weights that are no finite float32 numbers."""
    _obey(pipeline, _PIPELINE, where, frozenset({"inputs", "named", "text"}))
    _obey(pipeline["shift"], _SHIFT, f"{where}: 'shift'")
    names = []
    for i, column in enumerate(pipeline["columns"]):
        _obey(column, _PART, f"{where}: column {i + 1}", frozenset(_PART) - {"name", "type"})
        needed = ("codes",) if column["type"] == "categorical" else ("edges", "missing")
        if any(name not in column for name in needed):
            raise WeightclipError(f"{where}: column {i + 1} is not complete: it needs {' and '.join(needed)}.")
        names.append(column["name"])
    if len(set(names)) != len(names):
        raise WeightclipError(f"{where}: a column appears twice.")
    if (inputs := pipeline.get("inputs")) is not None and not set(names) <= set(inputs):
        raise WeightclipError(f"{where}: 'inputs' must name every column of the model.")
    classes, outputs = pipeline["classes"], pipeline["outputs"]
    if len({(type(c), c) for c in classes}) != len(classes):
        raise WeightclipError(f"{where}: a class label appears twice.")
    if pipeline["task"] == "regression" and (classes or outputs != 1):
        raise WeightclipError(f"{where}: a regression model has one output and no classes.")
    if pipeline["task"] == "classification" and (len(classes) < 2 or outputs != (len(classes) if classes[2:] else 1)):
        raise WeightclipError(f"{where}: {len(classes)} classes do not fit {outputs} outputs.")
    for name, value in weights.items():
        if value.dtype != np.float32 or not bool(np.isfinite(value).all()):
            raise WeightclipError(f"{where}: weights {name!r} must be finite float32 numbers.")
