"""``weightclip-study bench``: step time and memory of ordinary and private training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weightclip.errors import WeightclipError


def bench(
    model: Annotated[list[str] | None, typer.Option(help="mlp, convnet, wrn-16-4, mlp-deep, mlp-4096, "
                                                         "encoder-base, encoder-tiny, resnet18, resnet50")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="batch size (repeatable)")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="plain, weights, factors, both, joint-cap, exact-cap, "
                                                        "exact-joint-cap, weights-fast, "
                                                        "opacus-hooks, opacus-ghost, fastdp; as one CUDA graph: "
                                                        "plain-graph, weights-graph, ... (repeatable)")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one")] = "",
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    seconds: Annotated[float, typer.Option(help="measuring time per mode")] = 2.0,
    precision: Annotated[str, typer.Option(help="float32, tf32 or bf16 (autocast), in every mode")] = "float32",
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile in every mode")] = False,
    channels_last: Annotated[bool, typer.Option(help="channels-last memory in every mode")] = False,
    draws: Annotated[bool, typer.Option(help="batches of the sizes of Poisson draws")] = False,
    out: Annotated[Path, typer.Option(help="CSV file; a picture is written beside it")] = Path("runs/bench/step.csv"),
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
) -> None:  # fmt: skip
    """Step time and peak memory against plain training and Opacus, interleaved in one process.

    Example: weightclip-study bench --model convnet --batch 64 --batch 256 --mode plain --mode factors
    """
    import torch

    from weightclip_studies.bench import (
        GRAPHED,
        MODES,
        PRECISIONS,
        Setting,
        StepRow,
        installed,
        measure,
        models,
        plot,
        write_csv,
    )

    names, batches, modes = model or ["mlp", "convnet"], batch or [64, 256], mode or [m for m in MODES if installed(m)]
    choices = (names, list(models()), "--model"), (modes, [*MODES, *GRAPHED], "--mode")
    for given, known, option in (*choices, ([precision], list(PRECISIONS), "--precision")):
        for value in given:
            if value not in known:
                raise WeightclipError(f"{option} {value}: choose from {', '.join(known)}.")
    if "plain" not in modes:
        modes = ["plain", *modes]
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise WeightclipError("--device cuda: torch sees no GPU here.")
    if where.type != "cuda" and set(modes) & set(GRAPHED):
        raise WeightclipError(f"--mode {next(m for m in modes if m in GRAPHED)}: CUDA graphs need --device cuda.")
    if set(modes) & set(GRAPHED) and "plain-graph" not in modes:
        modes = ["plain-graph", *modes]
    setting = Setting(precision, compiled, channels_last, draws)
    torch.set_num_threads(threads)
    rows: list[StepRow] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(names) * len(batches))
        for name in names:
            for size in batches:
                progress.update(task, description=f"{name}, batch {size}")
                rows += measure(name, size, modes, where, seconds=seconds, setting=setting)
                progress.advance(task)
    write_csv(rows, out)
    plot(rows, out.with_suffix(".png"))
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table("model", "batch", "mode", "ms", "ratio", "GiB", "spread")
    for row in rows:
        memory = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        numbers = (f"{row.ms:.3f}", f"{row.ratio:.2f}", memory, f"{row.spread:.0%}")
        table.add_row(row.model, str(row.batch), row.mode, *numbers)
    Console().print(table)
    Console().print(f"written: {out}, {out.with_suffix('.png')}")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(bench)
