"""A training process that is there to be killed: ``python ledger_child.py FOLDER``.

Each line on its standard input (a block size, and the moment at which the run is to kill itself, or "never") forks a
process that resumes the run in FOLDER, and prints its pid. That process adds a byte to ``applied`` after every release
that reached the weights.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.accounting import _ledger

BEFORE = 3  # writes that go well before the moment comes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str) -> None:
    """Let the run kill itself while it writes a charge."""
    write, sync, seen = _ledger._write, _ledger._sync, [0]

    def writing(fd: int, data: bytes, at: int) -> None:
        seen[0] += 1
        if seen[0] > BEFORE and moment in ("before", "half"):
            if moment == "half":
                write(fd, data[: len(data) // 2], at)
            die()
        write(fd, data, at)
        if seen[0] > BEFORE and moment == "written":
            die()

    def syncing(fd: int) -> None:
        sync(fd)
        if seen[0] > BEFORE and moment == "synced":
            die()

    _ledger._write, _ledger._sync = writing, syncing


def private(ledger: Path | None, block: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    engine = wc.PrivacyEngine("rdp", ledger=ledger, ledger_block=block)
    data = TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))
    parts = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=6), noise_multiplier=1.0, bounds=wc.Bounds(input_radius=1.0),
    )  # fmt: skip
    return engine, *parts


def train(folder: Path, block: int) -> None:
    engine, model, optimizer, loader, loss = private(folder / "run.ledger", block)
    if (folder / "saved" / "ledger.json").exists():
        engine.load(folder / "saved")
    applied = os.open(folder / "applied", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            os.write(applied, b"x")
            if engine.steps % 5 == 0:
                engine.save(folder / "saved")


def main() -> None:
    folder = Path(sys.argv[1])
    private(None, 1)  # so that what is imported late is there before the first fork
    for line in sys.stdin:
        block, moment = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                arm(moment)
                train(folder, int(block))
            except BaseException:
                (folder / "failed").write_text(traceback.format_exc())
            finally:
                os._exit(1)
        print(pid, flush=True)
        status = os.waitpid(pid, 0)[1]
        print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
