"""Tools of the ledger's tests: small private runs on a ledger file, and what is on the disk at each release."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_kit import Run, mlp, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.accounting._ledger_format import Book, parse, read


def started(
    path: Path | None,
    *,
    block: int = 1,
    sigma: float | None = 1.0,
    seed: int | None = None,
    rate: float = 0.1,
    batch: int = 6,
    accountant: str = "rdp",
    **settings: Any,
) -> Run:
    """A private run on a ledger: 24 records, draws of 6 expected; sigma=None: make_private_with_epsilon."""
    model, data = mlp(), table(24)
    engine = wc.PrivacyEngine(accountant, ledger=path, ledger_block=block)
    common: dict[str, Any] = {
        "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=rate), "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(TensorDataset(*data), batch_size=batch), "bounds": wc.Bounds(input_radius=1.0),
        "generator": None if seed is None else torch.Generator().manual_seed(seed), **settings,
    }  # fmt: skip
    if sigma is None:
        return Run(engine, *engine.make_private_with_epsilon(**common), data)
    return Run(engine, *engine.make_private(noise_multiplier=sigma, **common), data)


def steps(run: Run, count: int) -> list[torch.Tensor]:
    """``count`` releases, across the ends of passes: the gradients after each, flat."""
    found: list[torch.Tensor] = []
    while len(found) < count:
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            found.append(torch.cat([g.flatten() for g in run.grads().values()]))
            if len(found) == count:
                break
    return found


def killed(run: Run) -> None:
    """What the system does for a process that is killed: its files are closed, nothing else happens."""
    ledger: Any = run.engine.ledger
    fd, ledger._fd = ledger._fd, -1
    os.close(fd)


def charges(path: Path) -> int:
    return read(path).charges


def book_of(data: bytes) -> Book:
    book = parse(data, "test")
    assert book is not None
    return book


@contextlib.contextmanager
def disk(path: Path) -> Iterator[dict[str, bytes]]:
    """What of ``path`` would survive a loss of power: its bytes at the last fsync."""
    image = {"bytes": path.read_bytes() if path.exists() else b""}
    sync = os.fsync

    def fsync(fd: int) -> None:
        sync(fd)
        if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
            image["bytes"] = path.read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield image
