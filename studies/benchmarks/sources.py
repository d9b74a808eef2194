"""A draw from 10^8 rows in a memory-mapped file: milliseconds and memory of finding, reading and training on it.

python studies/benchmarks/sources.py --rows 100000000 --folder FOLDER   # 1.7 GB at a time

Each kind of file is written with random bytes (fsync, then dropped from the page cache) and read by a process of its
own, one thread: an engine's loader hands out draws of 1,024 records on average. Memory is that after the last draw less
that before the file was opened, apart for the process itself and for pages of the file that it has touched.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

FIELDS: tuple[str, ...] = (
    "kind", "rows", "file_MB", "draws", "records", "find_ms", "find_and_read_ms", "step_ms", "own_MB", "mapped_MB",
)  # fmt: skip
WIDTH, BATCH, DRAWS, BLOCK = 4, 1024, 20, 1 << 20


def write(kind: str, rows: int, folder: Path) -> list[Path]:
    """The files of one kind: four float32 features and a label."""
    import numpy as np

    rng = np.random.default_rng(0)
    paths = [folder / "x.npy", folder / "y.npy"] if kind == "npy" else [folder / "t.arrow"]
    blocks = ((rng.random((min(BLOCK, rows - i), WIDTH), np.float32), i) for i in range(0, rows, BLOCK))
    if kind == "npy":
        x = np.lib.format.open_memmap(paths[0], "w+", np.float32, (rows, WIDTH))
        y = np.lib.format.open_memmap(paths[1], "w+", np.int8, (rows,))
        for block, i in blocks:
            x[i : i + len(block)], y[i : i + len(block)] = block, block[:, 0] > 0.5
        del x, y  # pages that are mapped stay in memory
    else:
        import pyarrow as pa

        schema = pa.schema({"x": pa.list_(pa.float32(), WIDTH), "y": pa.int8()})
        with pa.ipc.new_file(paths[0], schema) as sink:
            for block, _ in blocks:
                lists = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), WIDTH)
                sink.write_batch(pa.record_batch([lists, pa.array((block[:, 0] > 0.5).astype(np.int8))], schema=schema))
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return paths


def one(kind: str, paths: list[Path]) -> dict[str, str]:
    """Draws from the file, by an engine."""
    import pyarrow  # noqa: F401  its own memory is not the data's
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    import weightclip as wc

    torch.set_num_threads(1)
    model, engine = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2)), wc.PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = _memory()
    data = wc.ArrayDataset(*paths) if kind == "npy" else wc.ArrowDataset(paths[0], "x", "y")
    model, optimizer, loader, loss = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=BATCH),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0,
    )  # fmt: skip
    start = time.perf_counter()
    for t in range(DRAWS):
        loader.indices(10**6 + t)
    find = time.perf_counter() - start
    spent, steps, records, draws = 0.0, 0.0, 0, iter(loader)
    for _ in range(DRAWS):
        start = time.perf_counter()
        x, y = next(draws)
        middle = time.perf_counter()
        optimizer.zero_grad()
        loss(model(x), y.long()).backward()
        optimizer.step()
        spent, steps, records = spent + middle - start, steps + time.perf_counter() - middle, records + len(x)
    ms, (own, mapped) = 1000 / DRAWS, _memory()
    return {
        "kind": kind, "rows": str(len(data)), "file_MB": f"{sum(p.stat().st_size for p in paths) / 1e6:.0f}",
        "draws": str(DRAWS), "records": f"{records / DRAWS:.0f}", "find_ms": f"{find * ms:.1f}",
        "find_and_read_ms": f"{spent * ms:.1f}", "step_ms": f"{steps * ms:.1f}",
        "own_MB": f"{own - before[0]:.0f}", "mapped_MB": f"{mapped - before[1]:.0f}",
    }  # fmt: skip


def _memory() -> tuple[float, float]:
    """Megabytes of this process: its own, and pages of files, which the system takes back when it needs them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(lines["RssAnon"].split()[0]) / 1024, float(lines["RssFile"].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/bench/sources.csv"))
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        csv.DictWriter(sys.stdout, FIELDS).writerow(one(given.one[0], [Path(p) for p in given.one[1:]]))
        return
    with given.out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(FIELDS)
        for kind in ("npy", "arrow"):
            paths = write(kind, given.rows, given.folder)
            try:
                command = [sys.executable, __file__, "--folder", str(given.folder), "--one", kind, *map(str, paths)]
                row = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            finally:
                for path in paths:
                    path.unlink()
            print(row)
            file.write(row + "\n")


if __name__ == "__main__":
    main()
