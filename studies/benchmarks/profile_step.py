"""Where the time of one training step goes: its five parts by the clock, and the profiler's longest kernels."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from weightclip_studies.bench import _step as _bench

PARTS = ("zero_grad", "forward", "loss", "backward", "step")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mlp", choices=list(_bench.models()))
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--mode", default="weights", choices=[*_bench.MODES, *_bench.GRAPHED])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lines", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device, times = torch.device(options.device), defaultdict(list)

    def timed(model: Any, optimizer: Any, loss: Any, x: Any, y: Any) -> None:
        marks = [time.perf_counter()]
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        z = model(x)
        marks.append(time.perf_counter())
        value = loss(z, y)
        marks.append(time.perf_counter())
        value.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        for part, before, after in zip(PARTS, marks, marks[1:], strict=False):
            times[part].append(after - before)

    _bench._step = timed
    with _bench.precision("float32"):
        step = _bench.prepare(options.mode, options.model, options.batch, device)
        for _ in range(20):
            step()
        times.clear()
        for _ in range(options.steps):
            step()
        for part in PARTS:  # on a GPU: the host's share; a recorded step has none of these parts
            if times[part]:
                print(f"{part:10} {1e6 * statistics.median(times[part]):10.1f} us")
        cuda = device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
            for _ in range(5):
                step()
            if cuda:
                torch.cuda.synchronize(device)
    field = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, field))
    print(
        f"in all {sum(getattr(r, field) for r in rows) / 5:.0f} us, {sum(r.count for r in rows) / 5:.0f} calls a step"
    )
    for row in rows[: options.lines]:
        print(f"{getattr(row, field) / 5:10.1f} us x{row.count / 5:6.1f} {row.key[:100]}")


if __name__ == "__main__":
    main()
