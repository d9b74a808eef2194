"""``weightclip-study text``: SST-2 with a pretrained sentence encoder, privately."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightclip.errors import WeightclipError


def text(
    part: Annotated[list[str] | None, typer.Option(help="head, lora, last, full (repeatable; default head)")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="cap, factors, quantiles, opacus, non-private (repeatable; default all)")
    ] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="privacy budget (repeatable; default 1, 3, 8)")] = None,
    seeds: Annotated[int, typer.Option(help="runs of the chosen settings on the test part", min=1)] = 5,
    epochs: Annotated[int, typer.Option(help="passes over the data", min=1)] = 20,
    batch: Annotated[int, typer.Option(help="expected batch size", min=1)] = 4096,
    piece: Annotated[int | None, typer.Option(help="records of a physical batch", min=1)] = None,
    records: Annotated[int | None, typer.Option(help="train on the first so many sentences only", min=100)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one")] = "",
    runs: Annotated[Path, typer.Option(help="folder that keeps every trial")] = Path("runs/text"),
    out: Annotated[Path, typer.Option(help="CSV file; other rows in it are kept")] = Path("runs/text/sst2.csv"),
) -> None:
    """Fine-tune MiniLM on SST-2: settings chosen on the dev part by the same trials for all, test part read once.

    Example: weightclip-study text --part head --epsilon 3
    """
    import torch

    from weightclip.text import load_encoder
    from weightclip_studies.text import Full, Head, Last, Lora, Sentences, Study, load_sst2
    from weightclip_studies.text._study import write
    from weightclip_studies.text._training import METHODS

    parts = {"head": Head(), "lora": Lora(), "last": Last(), "full": Full()}
    for value in part or ():
        if value not in parts:
            raise WeightclipError(f"--part {value}: choose from {', '.join(parts)}.")
    for value in method or ():
        if value not in METHODS:
            raise WeightclipError(f"--method {value}: choose from {', '.join(METHODS)}.")
    for value in epsilon or ():
        if not 0 < value < 100:
            raise WeightclipError(f"--epsilon {value:g}: choose a number above 0.")
    if device and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise WeightclipError(f"--device {device}: choose cpu or cuda.")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    train = load_sst2("train")
    train = Sentences(train.texts[:records], train.labels[:records])
    study = Study(load_encoder("minilm"), train, load_sst2("dev"), load_sst2("test"), runs, place, epochs, batch, piece)
    console, budgets = Console(stderr=True), epsilon or [1.0, 3.0, 8.0]
    for name in part or ["head"]:
        for way in method or METHODS:
            for budget in [None] if way == "non-private" else budgets:
                write(out, [study.row(parts[name], way, budget, range(seeds), console.print)])
    print(out)
