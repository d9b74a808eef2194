"""How the certificate grows with depth, a certified norm with width, a Poisson draw with the data set."""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

import torch
from torch import nn

import weightclip as wc
from weightclip.bounds import Numerics
from weightclip.certificate import NormBank, build_plan
from weightclip.losses import recognise
from weightclip.noise import SAMPLING, Streams
from weightclip.sampling import poisson_indices

WIDTH = 316  # 1000 layers of 316 x 316 are 100 million parameters


def certificate(depth: int, device: torch.device) -> list[tuple[str, int, float]]:
    """Tracing, once; norms of all weights and the chain of bounds, each time weights have changed."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    began = time.perf_counter()
    loss = recognise(nn.CrossEntropyLoss())
    plan = build_plan(model, loss, wc.Bounds(input_radius=1.0, spectral=False), torch.zeros(1, WIDTH, device=device))
    traced = time.perf_counter()
    found = plan.evaluate(Numerics())
    _ = float(found[next(iter(found))].sensitivity)
    return [("trace", parameters, traced - began), ("certificate", parameters, time.perf_counter() - traced)]


def norm(width: int, device: torch.device) -> list[tuple[str, int, float]]:
    """The certified norm of one square dense layer, as clipping takes it after every step; median of five."""
    bank = NormBank({"": nn.Linear(width, width).to(device)})
    times = []
    for _ in range(6):
        began = time.perf_counter()
        float(bank.vector())
        times.append(time.perf_counter() - began)
    return [("norm", width, statistics.median(times[1:]))]


def sampling(rows: int, q: float) -> list[tuple[str, int, float]]:
    """One draw, and the memory it took beyond the data."""
    rng = Streams.seeded(0).numpy(SAMPLING, 0)
    began = time.perf_counter()
    for _ in range(20):
        poisson_indices(rng, q, rows)
    seconds = (time.perf_counter() - began) / 20
    tracemalloc.start()
    poisson_indices(rng, q, rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return [("draw", rows, seconds), ("draw, bytes", rows, float(peak))]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", nargs="+", type=int, default=[100, 300, 1000])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/bench/growth.csv"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{options.threads}"
    rows = [(label, depth, *line) for depth in options.depths for line in certificate(depth, device)]
    rows += [(label, 1, *line) for width in (128, 512, 1024, 2048) for line in norm(width, device)]
    rows += [("cpu", 0, *line) for n in (10**6, 10**8) for line in sampling(n, 1e-5)]
    for row in rows:
        print(row, file=sys.stderr)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("device", "layers", "what", "size", "value"))
        writer.writerows((d, n, what, size, round(value, 6)) for d, n, what, size, value in rows)


if __name__ == "__main__":
    main()
