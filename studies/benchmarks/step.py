"""Step time and memory of all modes over models and batches; `weightclip-study bench --help` is the command line."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from pathlib import Path

import torch

from weightclip.errors import WeightclipError
from weightclip_studies.bench import (
    GRAPHED,
    MODES,
    PRECISIONS,
    Setting,
    StepRow,
    file_of,
    installed,
    measure,
    models,
    plot,
    read_csv,
    write_csv,
)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "convnet"], choices=list(models()))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--modes", nargs="+", default=[m for m in MODES if installed(m)], choices=[*MODES, *GRAPHED])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seconds", type=float, default=2.0, help="per mode")
    parser.add_argument("--precision", default="float32", choices=PRECISIONS, help="bf16: autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile in every mode")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--draws", action="store_true", help="batches of the sizes of Poisson draws")
    parser.add_argument("--within", type=float, default=math.inf, help="begin no mode of a batch later (seconds)")
    parser.add_argument("--append", action="store_true", help="keep the rows of other settings that the file has")
    parser.add_argument("--out", type=Path, help="results/bench/step.csv, with --draws draws.csv there")
    options = parser.parse_args()
    try:
        out = file_of(options.draws, options.out)
    except WeightclipError as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    setting = Setting(options.precision, options.compile, options.channels_last, options.draws)
    rows: list[StepRow] = []
    for name in options.models:
        for batch in options.batches:
            how = {"seconds": options.seconds, "setting": setting, "within": options.within}
            for row in measure(name, batch, options.modes, torch.device(options.device), **how):
                rows.append(row)
                memory = "" if row.peak_gib is None else f"{row.peak_gib:.2f} GiB"
                line = f"{row.model:9} {row.batch:6} {row.mode:13} {row.ms:9.3f} ms  x{row.ratio:5.2f}  {memory}"
                print(f"{line}  +-{row.spread:.0%}", file=sys.stderr)
            write_csv(rows, out, options.append)
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: the rows are written, the picture is not", file=sys.stderr)
        return
    plot(read_csv(out), out.with_suffix(".png"))


if __name__ == "__main__":
    main()
