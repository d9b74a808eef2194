"""What Python and launches of operators cost in one step, without a GPU: an encoder of 12 layers that is very thin.

It has as many products as one of the size of BERT, and hardly any arithmetic: nearly all of its time is the host's. The
modes take turns, and what counts is the time this process was computing, so that a busy machine changes little.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch

from weightclip_studies.bench import MODES, PRECISIONS, Setting, models, prepare


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="encoder-thin", choices=list(models()))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--modes", nargs="+", default=["plain", "factors", "exact-joint-cap"], choices=MODES)
    parser.add_argument("--precision", default="bf16", choices=PRECISIONS, help="bf16: autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile in every mode")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each mode that are timed, in turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(options.precision, options.compile)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpu = torch.device("cpu")
        steps = {mode: prepare(mode, options.model, options.batch, cpu, setting) for mode in options.modes}
        for step in steps.values():
            for _ in range(5):
                step()
        times: dict[str, list[float]] = {mode: [] for mode in steps}
        for _ in range(options.rounds):
            for mode, step in steps.items():
                began = time.process_time()
                step()
                times[mode].append(1e3 * (time.process_time() - began))
    first = statistics.median(times[options.modes[0]])
    print(f"{options.model}, batch {options.batch}, {options.precision}, {'compiled' if options.compile else 'eager'}")
    for mode, values in times.items():
        low, middle, _ = statistics.quantiles(values, n=4)
        print(f"  {mode:16} {middle:8.2f} ms (lower quartile {low:8.2f})  x{middle / first:5.2f}")


if __name__ == "__main__":
    main()
