"""What several processes cost: seconds of a step on 1, 2 and 4 CPU ranks, beside the model of docs/scale.md.

    OMP_NUM_THREADS=1 python studies/benchmarks/ranks.py [--worlds 1 2 4] [--steps 12] [--out results/bench/ranks.csv]

``--worlds 1 2 --steps 8`` is enough for the ratio of private to plain training on 1 and 2 ranks, which is printed last.
Every rank is one process with one thread (gloo). On a machine with fewer free cores than ranks a step takes longer than
the model says; the processor time of a rank, which is shown beside the time on the clock, does not. Plain training is
``DistributedDataParallel`` on the same number of records.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip_studies.bench import endless_steps

MODELS = {"mlp": (64, 256, 256, 10), "wide": (512, 1024, 1024, 10)}
FIELDS = ["model", "parameters", "what", "ranks", "batch", "wall_s", "cpu_s", "message_bytes", "model_s"]


def network(sizes: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def plain_step(sizes: tuple[int, ...], batch: int) -> Callable[[], None]:
    """Ordinary training, data parallel where there are several ranks."""
    model = network(sizes)
    wrapped = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    x, y = torch.randn(batch // dist.get_world_size(), sizes[0]), torch.zeros(batch // dist.get_world_size()).long()

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()

    return step


def private_step(sizes: tuple[int, ...], batch: int, **settings: Any) -> Callable[[], None]:
    """The ordinary private loop, draw after draw."""
    model = network(sizes)
    data = TensorDataset(torch.randn(8 * batch, sizes[0]), torch.zeros(8 * batch).long())
    engine, optimizer = wc.PrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.01)
    _, _, loader, loss = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=batch), noise_multiplier=1.0,
        criterion=nn.CrossEntropyLoss(), **settings,
    )  # fmt: skip

    return endless_steps(engine, model, optimizer, loader, loss)


def measured(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Median seconds of a step on the clock, and of processor time."""
    wall, cpu = [], []
    for turn in range(steps + 3):
        dist.barrier()
        began, spent = time.perf_counter(), time.process_time()
        step()
        if turn >= 3:
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - spent)
    return statistics.median(wall), statistics.median(cpu)


def exchange_step(size: int) -> Callable[[], None]:
    """What the engine sends for so many parameters: facts to agree on, sums to rank 0, the release to all."""
    ranks, sums, released = wc.PrivacyEngine().ranks, torch.zeros(size, dtype=torch.float64), torch.zeros(size)
    few = torch.zeros(4, dtype=torch.float64)

    def step() -> None:
        ranks.agree(lambda: {"the step": b"1"})
        ranks.largest(few)
        ranks.sum_to_first(sums)
        ranks.spread([released])

    return step


def noise_step(size: int) -> Callable[[], None]:
    """Noise for so many parameters, made by rank 0 alone."""
    streams, room = wc.noise.Streams.secure(), torch.empty(size)

    def step() -> None:
        if dist.get_rank() == 0:
            streams.normal_(room, "bench", 0)

    return step


def work(rank: int, world: int, store: str, sizes_of_draws: list[int], steps: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    rows = []
    for batch, (name, sizes) in itertools.product(sizes_of_draws, MODELS.items()):
        size = sum(p.numel() for p in network(sizes).parameters())
        whats = {
            "plain": functools.partial(plain_step, sizes, batch),
            "private": functools.partial(private_step, sizes, batch),
            "private, integer sums": functools.partial(
                private_step, sizes, batch, max_physical_batch_size=max(1, batch // 4), exact_sums=True
            ),
            "exchange": functools.partial(exchange_step, size),
            "noise": functools.partial(noise_step, size),
        }
        for what, make in whats.items():
            wall, cpu = measured(make(), steps)
            # float64 sums go to rank 0, float32 gradients come back; the rest is a few hundred bytes
            sent = 0 if world == 1 or what == "noise" else 4 * size if what == "plain" else 12 * size
            rows.append([name, size, what, world, batch, f"{wall:.6f}", f"{cpu:.6f}", sent])
    if rank == 0:
        with Path(out).open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    dist.barrier()
    dist.destroy_process_group()


def modelled(rows: list[dict[str, str]]) -> None:
    """Fill in what docs/scale.md predicts of a private step's processor time, from one process and the exchange alone.

    T(W) = A b/W + O + X(W): A seconds a record and O for the rest (noise above all) from the two draws of one process,
    X(W) the exchange as it was measured by itself.
    """

    def cpu(name: str, what: str, ranks: str, batch: int) -> float:
        (row,) = [
            r for r in rows if [r[k] for k in ("model", "what", "ranks", "batch")] == [name, what, ranks, str(batch)]
        ]
        return float(row["cpu_s"])

    batches = sorted({int(row["batch"]) for row in rows})
    for row in rows:
        row["model_s"] = ""
        if row["what"] == "private" and len(batches) > 1:
            name, batch = row["model"], int(row["batch"])
            small, large = (cpu(name, "private", "1", b) for b in (batches[0], batches[-1]))
            a = (large - small) / (batches[-1] - batches[0])
            predicted = (
                a * batch / int(row["ranks"]) + small - a * batches[0] + cpu(name, "exchange", row["ranks"], batch)
            )
            row["model_s"] = f"{predicted:.6f}"


def ratios(rows: list[dict[str, str]]) -> str:
    """Private over plain training on the clock, and that of several ranks over that of one: 1.05 is the goal."""
    wall = {(r["model"], r["batch"], r["ranks"], r["what"]): float(r["wall_s"]) for r in rows}
    lines = []
    for name, batch, ranks, what in wall:
        if what == "private":
            here, alone = (
                wall[name, batch, n, "private"] / wall[name, batch, n, "plain"]
                if (name, batch, n, "plain") in wall
                else 0
                for n in (ranks, "1")
            )
            beside = f", {here / alone:.3f} times that of one rank" if alone and ranks != "1" else ""
            lines.append(f"{name}, {batch} records, {ranks} ranks: private/plain {here:.2f}{beside}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What several processes cost.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--out", default="results/bench/ranks.csv")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    Path(options.out).write_text(",".join(FIELDS[:-1]) + "\n")
    for world in options.worlds:
        store = Path(tempfile.mkdtemp()) / "store"
        spawn(work, (world, str(store), options.batches, options.steps, options.out), nprocs=world)
    with Path(options.out).open() as file:
        rows = list(csv.DictReader(file))
    modelled(rows)
    with Path(options.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(Path(options.out).read_text())
    print(ratios(rows))


if __name__ == "__main__":
    main()
