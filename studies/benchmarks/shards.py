"""Peak memory of a rank under fully_shard: private training beside plain training of the same sharded model.

    python studies/benchmarks/shards.py [--world 2] [--depth 40] [--out results/bench/shards.csv]

Every row is measured in fresh processes (gloo, one thread each): resident memory above what the process held after the
same training of a tiny model (which loads libraries and fills caches), at its highest during steps after the second one
(the kernel's VmHWM, reset after the warm-up), and over the whole run, start included. glibc returns blocks of 64 KiB
and more at once (MALLOC_MMAP_THRESHOLD_), so that the highest mark shows tensors and not what the allocator kept.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip_studies.bench import endless_steps

WIDTH = 1024
PRIVATE: dict[str, dict[str, Any]] = {
    "private, a cap for each layer": {"bounds": wc.Bounds(layer_cap=1.0)},
    "private, one cap (default)": {},
    "private, a cap for each layer, four pieces": {"bounds": wc.Bounds(layer_cap=1.0), "pieces": 4},
}
FIELDS = ["what", "ranks", "parameters", "batch", "step_mib", "run_mib", "step_s", "step_of_plain", "run_of_plain"]


def network(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    model = nn.Sequential(*blocks, nn.Linear(width, 10))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def plain_step(width: int, depth: int, batch: int) -> Callable[[], None]:
    """Ordinary training of the sharded model."""
    model = network(width, depth)
    optimizer, loss = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
    rows = batch // dist.get_world_size()
    x, y = torch.randn(rows, width), torch.zeros(rows).long()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def private_step(width: int, depth: int, batch: int, pieces: int = 1, **settings: Any) -> Callable[[], None]:
    """The ordinary private loop, draw after draw, of records that are made when they are read."""
    model, n = network(width, depth), 8 * batch
    data = TensorDataset(torch.zeros(1, width).expand(n, width), torch.zeros(n).long())
    engine, optimizer = wc.PrivacyEngine(), torch.optim.Adam(model.parameters())
    if pieces > 1:
        settings["max_physical_batch_size"] = batch // pieces
    _, _, loader, loss = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=batch), noise_multiplier=1.0,
        criterion=nn.CrossEntropyLoss(), **settings,
    )  # fmt: skip

    return endless_steps(engine, model, optimizer, loader, loss)


def memory(name: str) -> float:
    """MiB that the kernel counts under this name."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":")]
    return int(line.split()[1]) / 1024


def work(rank: int, world: int, store: str, what: str, depth: int, batch: int, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    base = 0.0
    for width in (8, WIDTH):
        base = memory("VmRSS")
        step = (
            plain_step(width, depth, batch) if what == "plain" else private_step(width, depth, batch, **PRIVATE[what])
        )
        for _ in range(2):
            step()
    start = memory("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - began) / steps
    peak = memory("VmHWM")
    found = torch.tensor([peak - base, max(start, peak) - base])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if rank == 0:
        size = depth * (WIDTH + 1) * WIDTH + 10 * (WIDTH + 1)
        with Path(out).open("a", newline="") as file:
            row = [what, world, size, batch, f"{found[0]:.1f}", f"{found[1]:.1f}", f"{seconds:.3f}"]
            csv.writer(file, lineterminator="\n").writerow(row)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of a rank under fully_shard.")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--depth", type=int, default=40)
    parser.add_argument("--batches", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", default="results/bench/shards.csv")
    options = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"})
    Path(options.out).write_text(",".join(FIELDS[:-2]) + "\n")
    for batch in options.batches:
        for what in ["plain", *PRIVATE]:
            store = Path(tempfile.mkdtemp()) / "store"
            given = options.world, str(store), what, options.depth, batch, options.steps, options.out
            spawn(work, given, nprocs=options.world)
    with Path(options.out).open() as file:
        rows = list(csv.DictReader(file))
    plain = {row["batch"]: row for row in rows if row["what"] == "plain"}
    for row in rows:
        for name in ("step", "run"):
            row[f"{name}_of_plain"] = f"{float(row[f'{name}_mib']) / float(plain[row['batch']][f'{name}_mib']):.3f}"
    with Path(options.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(Path(options.out).read_text())


if __name__ == "__main__":
    main()
