"""Where the time of one training step goes: what the clock says, what the host alone takes, and the longest kernels."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from weightclip_studies.bench import GRAPHED, MODES, PRECISIONS, Setting, models
from weightclip_studies.bench import _step as _bench

BLOCK = 8  # steps between looks at the clock


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mlp", choices=list(models()))
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--mode", default="weights", choices=[*MODES, *GRAPHED])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="float32", choices=PRECISIONS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--blocks", type=int, default=9, help=f"of {BLOCK} steps")
    parser.add_argument("--lines", type=int, default=25)
    options = parser.parse_args()
    device = torch.device(options.device)
    cuda = device.type == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    with _bench.precision(options.precision):
        setting = Setting(options.precision, options.compile)
        step = _bench.prepare(options.mode, options.model, options.batch, device, setting)
        for _ in range(20):
            step()
        whole, host = [], []
        for _ in range(options.blocks):
            wait()
            began = time.perf_counter()
            for _ in range(BLOCK):
                step()
            host.append((time.perf_counter() - began) / BLOCK)
            wait()
            whole.append((time.perf_counter() - began) / BLOCK)
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
            for _ in range(5):
                step()
            wait()
    print(f"a step {1e3 * statistics.median(whole):.3f} ms, of which the host {1e3 * statistics.median(host):.3f} ms")
    field = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, field))
    total, calls = sum(getattr(r, field) for r in rows) / 5, sum(r.count for r in rows) / 5
    print(f"in all {total:.0f} us, {calls:.0f} calls a step")
    for row in rows[: options.lines]:
        print(f"{getattr(row, field) / 5:10.1f} us x{row.count / 5:6.1f} {row.key[:100]}")


if __name__ == "__main__":
    main()
