"""What a checkpoint must hold before anything of it is used, and who may change it when several processes want to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightclip.errors import WeightclipError

_SETTINGS = ("noise_multiplier", "sample_rate", "expected_batch_size", "mechanism")
_KINDS = ("torch.float64", "torch.float32", "torch.bfloat16", "torch.float16")
_MOST = 1 << 64  # nonces have 56 bits


def check_ledger(ledger: Any, tensors: dict[str, Tensor]) -> None:
    """Refuse a ledger of the wrong shape: a file may be whole, with a checksum to match, and still be made up.

    Formal guarantees:
        Counts are whole numbers of at least 0: a checkpoint cannot take back a step that was charged.

    Raises:
        ValueError: What is wrong, in a few words.
    """
    if not isinstance(ledger, dict):
        raise ValueError("its ledger is no object")
    for name in ("steps", "draws", "resumed"):
        _need(_whole(ledger.get(name)), f"'{name}' must be a whole number of at least 0")
    runs = ledger.get("runs", {"": ledger["steps"]})
    counted = isinstance(runs, dict) and all(map(_whole, runs.values())) and sum(runs.values()) == ledger["steps"]
    _need(counted, "'runs' must count as many steps as 'steps'")
    settings = ledger.get("settings")
    _need(isinstance(settings, dict) and all(name in settings for name in _SETTINGS), "'settings' is not complete")
    for name in ("gains", "quantiles", "optimizer", "streams", "data"):
        _need(name in ledger, f"'{name}' is missing")
    _check_streams(ledger["streams"], ledger["data"], tensors)
    _check_gains(ledger["gains"], tensors)
    limits = ledger["quantiles"] or {}
    lists = isinstance(limits, dict) and all(isinstance(v, list) and all(map(_number, v)) for v in limits.values())
    _need(lists, "'quantiles' must hold lists of numbers")
    _check_nested(ledger["optimizer"], tensors, 0)
    _need(isinstance(ledger["optimizer"], dict) and "__dict__" in ledger["optimizer"], "'optimizer' is not complete")
    for name, value in tensors.items():
        if name.startswith("model.") and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError("its weights are not finite")


def _check_streams(streams: Any, data: Any, tensors: dict[str, Tensor]) -> None:
    if streams is None:
        return
    fits = isinstance(streams, dict) and isinstance(streams.get("seed"), int) and isinstance(streams.get("path"), list)
    words = fits and all(type(n) is int and -(2**63) <= n < 2**63 for n in streams["path"])  # nonces and digests
    _need(words and isinstance(data, str), "'streams' is not complete")
    random = tensors.get("random.cpu")
    try:
        torch.Generator().set_state(random)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        raise ValueError("its random state is missing or none of torch's") from None


def _check_gains(gains: Any, tensors: dict[str, Tensor]) -> None:
    if gains is None:
        return
    fits = isinstance(gains, dict) and _whole(gains.get("since")) and isinstance(gains.get("gain"), dict)
    numerics = gains.get("numerics") if isinstance(gains, dict) else None
    fits = fits and isinstance(numerics, list) and len(numerics) == 2 and _number(numerics[1])
    fits = fits and numerics is not None and numerics[0] in _KINDS
    known = fits and all(_number(v) and v >= 0 and f"gains.{k}" in tensors for k, v in gains["gain"].items())
    _need(known, "'gains' is not complete")


def _check_nested(value: Any, tensors: dict[str, Tensor], depth: int) -> None:
    """The optimiser's state: plain values, tensors by name, and dictionaries and lists of these."""
    _need(depth < 50, "'optimizer' is nested too deeply")
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    _need(isinstance(value, dict), "'optimizer' holds what no optimiser does")
    if set(value) == {"__tensor__"}:
        name = value["__tensor__"]
        _need(isinstance(name, str) and name in tensors, "a tensor of 'optimizer' is missing")
    elif set(value) == {"__dict__"}:
        pairs = value["__dict__"]
        fits = isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 2 for p in pairs)
        _need(fits and all(isinstance(k, (int, str)) for k, _ in pairs), "'optimizer' holds what no optimiser does")
        for _, item in pairs:
            _check_nested(item, tensors, depth + 1)
    else:
        fits = set(value) == {"__list__", "tuple"} and isinstance(value["__list__"], list)
        _need(fits, "'optimizer' holds what no optimiser does")
        for item in value["__list__"]:
            _check_nested(item, tensors, depth + 1)


@contextlib.contextmanager
def readable(path: Any) -> Iterator[None]:
    """Whatever a made-up checkpoint makes fail, as one line."""
    try:
        yield
    except WeightclipError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise WeightclipError(f"cannot read the checkpoint '{path}': {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time between writing new weights and removing old ones: two that save into one folder take
    turns, and the last one wins. A process that dies gives its turn back."""
    try:
        import fcntl
    except ImportError:  # Windows refuses to remove a file that another process has open
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _need(holds: Any, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _number(v: Any) -> bool:
    return isinstance(v, (int, float)) and not isinstance(v, bool) and v == v


def _whole(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and 0 <= v < _MOST
