"""Processes that train together: started from a server that has torch already, so that a group costs little time."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import weightclip as wc

Patch = Callable[[], None]
_SERVER = mp.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["tests.ranks_kit", "weightclip.engine", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
)
TIMEOUT, PATIENCE = 40.0, 100.0  # seconds until a rank gives up on the others, and until a group counts as stuck


@dataclass(frozen=True)
class Failed:
    """What a rank raised, as one line."""

    kind: str
    text: str
    trace: str = ""


def _child(pipe: Connection, rank: int, world: int, store: str, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
        )
        pipe.send_bytes(pickle.dumps(job(*args)))  # plainly: torch would send handles of memory that ends with us
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(Failed(type(error).__name__, str(error), traceback.format_exc())))
    pipe.close()
    os._exit(0)  # gloo waits for nobody


def start(world: int, job: Callable[..., Any], *args: Any) -> list[tuple[Any, Connection]]:
    """``job(*args)`` in a group of ``world`` processes: (process, where its outcome arrives) of each rank."""
    store = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
    found = []
    for rank in range(world):
        here, there = _SERVER.Pipe(duplex=False)
        process = _SERVER.Process(target=_child, args=(there, rank, world, str(store), job, args))
        process.start()
        there.close()
        found.append((process, here))
    return found


def finish(group: list[tuple[Any, Connection]]) -> list[Any]:
    """Outcomes of a group by rank: what the job returned, :class:`Failed`, or None for a rank that was killed."""
    outcomes: dict[int, Any] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(group)}
    while waiting:
        ready = wait(list(waiting), timeout=PATIENCE)
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)  # pyright: ignore[reportArgumentType]
            try:
                outcomes[rank] = pickle.loads(group[rank][1].recv_bytes())
            except EOFError:
                outcomes[rank] = None
    for process, pipe in group:
        if waiting:
            process.kill()
        process.join()
        pipe.close()
    assert not waiting, f"ranks {sorted(waiting.values())} are stuck"
    return [outcomes[rank] for rank in range(len(group))]


def together(world: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Outcomes of ``job(*args)`` in a group of ``world`` processes."""
    return finish(start(world, job, *args))


def results(world: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """The same where no rank may fail."""
    found = together(world, job, *args)
    for outcome in found:
        assert not isinstance(outcome, Failed), outcome.trace
    return found


# -- what the ranks do -------------------------------------------------------------------------------------------------


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def table(n: int = 48, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)


@dataclass
class Private:
    """A private run on one rank."""

    engine: wc.PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    criterion: Any

    def train(self, steps: int) -> Private:
        """So many releases."""
        while self.engine.steps < steps:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                self.criterion(self.model(x), y).backward()
                self.optimizer.step()
                if self.engine.steps >= steps:
                    break
        return self

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def private(
    model: nn.Module | None = None, data: tuple[Tensor, Tensor] | Dataset | None = None, *, sigma: float = 1.0,
    batch: int = 12, seed: int | None = 0, ledger: Any = None, lr: float = 0.5, momentum: float = 0.0, **settings: Any,
) -> Private:  # fmt: skip
    """make_private with SGD, a small table and a seed."""
    model = mlp() if model is None else model
    records = data if isinstance(data, Dataset) else TensorDataset(*(data or table()))
    engine = wc.PrivacyEngine("rdp", ledger=ledger)
    settings.setdefault("generator", None if seed is None else torch.Generator().manual_seed(seed))
    parts = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum),
        data_loader=DataLoader(records, batch_size=batch),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=sigma, **settings,
    )  # fmt: skip
    return Private(engine, *parts)
