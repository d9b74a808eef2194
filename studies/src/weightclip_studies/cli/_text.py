"""``weightclip-study text``: SST-2 with a pretrained sentence encoder, privately."""

from __future__ import annotations

import re
import threading
import time
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
    epsilon: Annotated[list[float] | None, typer.Option(help="privacy budget (repeatable; default 8, 3, 1)")] = None,
    seeds: Annotated[int, typer.Option(help="runs of the chosen settings on the test part", min=1)] = 5,
    epochs: Annotated[int, typer.Option(help="passes over the data", min=1)] = 12,
    batch: Annotated[int, typer.Option(help="expected batch size", min=1)] = 4096,
    piece: Annotated[int | None, typer.Option(help="records of a physical batch", min=1)] = None,
    length: Annotated[int, typer.Option(help="tokens read of a training sentence", min=8, max=64)] = 32,
    rank: Annotated[int, typer.Option(help="rank of the updates of --part lora", min=1)] = 16,
    records: Annotated[int | None, typer.Option(help="train on the first so many sentences only", min=100)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one")] = "",
    jobs: Annotated[int, typer.Option(help="runs at the same time, each in a process of its own", min=1)] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="begin no run after so many minutes; 0: rows of what was run before", min=0)
    ] = None,
    timing: Annotated[bool, typer.Option("--timing", help="time a few steps of each method; make no rows")] = False,
    canaries: Annotated[
        int, typer.Option(help="audit one run of each row by so many inserted sentences; make no rows", min=0)
    ] = 0,
    prepare: Annotated[bool, typer.Option("--prepare", help="write the encoder and the tokens, train nothing")] = False,
    prepared: Annotated[Path, typer.Option(help="folder that --prepare writes")] = Path("runs/text/prepared"),
    runs: Annotated[Path, typer.Option(help="folder that keeps every trial")] = Path("runs/text"),
    out: Annotated[Path, typer.Option(help="CSV file; other rows in it are kept")] = Path("runs/text/sst2.csv"),
) -> None:
    """Fine-tune MiniLM on SST-2: settings chosen on the dev part by the same trials for all, test part read once.

    First --prepare, then --part lora --epsilon 8 --method cap --method opacus --jobs 3, say.

    Example: weightclip-study text --prepare --part lora
    """
    import torch

    from weightclip.text import load_encoder
    from weightclip_studies.text import (
        METHODS,
        SPLITS,
        Canaries,
        Full,
        Head,
        Last,
        Lora,
        Part,
        Prepared,
        Study,
        figure,
        load_sst2,
    )
    from weightclip_studies.text import prepare as write_prepared

    parts = {"head": Head(), "lora": Lora(rank), "last": Last(), "full": Full()}
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
    names, methods = part or ["head"], method or list(METHODS)
    if prepare:
        write_prepared(prepared, load_encoder("minilm"), {s: load_sst2(s) for s in SPLITS}, "head" in names)
        print(prepared)
        return
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    until = float("inf") if minutes is None else time.time() + 60 * minutes if minutes else 0.0
    study = Study(Prepared(prepared), runs, place, epochs, batch, piece, length, records, until)
    told = Console(stderr=True).print
    if timing:
        for name in names:
            for way in dict.fromkeys(["non-private", *methods]):
                found = study.pace(parts[name], way)
                told(f"{name} {way}: {'not timed' if found is None else found}")
        print(runs)
        return
    budgets = epsilon or [8.0, 3.0, 1.0]
    wanted: list[tuple[Part, str, float | None]] = [
        (parts[n], way, e) for n in names for e in budgets for way in methods if way != "non-private"
    ]
    for n in names if "non-private" in methods else ():
        behind = [i for i, row in enumerate(wanted, 1) if row[0] is parts[n] and row[2] == budgets[0]]
        wanted.insert(behind[-1] if behind else len(wanted), (parts[n], "non-private", None))
    if canaries:
        for name, way, budget in wanted:
            if budget is not None and way != "opacus":
                found = Canaries(canaries).audit(study, name, study.grid(name, way)[1], budget)
                told(f"{name.name} {way}: {found}")
                print(f"{name.name} {way}: epsilon claimed {budget:g}, at least {found.epsilon_lower:.2f}")
        return
    _rows(study, wanted, seeds, jobs, out, told)
    if out.exists():
        figure(out, out.with_suffix(".png"))
    print(out)


def _rows(study, wanted, seeds: int, jobs: int, out: Path, told) -> None:
    """Write each row as soon as it is there; as many as there are jobs are under way at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    from weightclip_studies.text import Jobs, write

    lock, pool = threading.Lock(), None
    for part, way, budget in wanted if study.until else ():
        for settings in study.grid(part, way):
            study.sigma(settings, budget)  # before processes share the table

    def make(row) -> None:
        found = study.row(*row, seeds, told)
        with lock:
            if found is not None:
                write(out, [found])

    if jobs > 1 and study.until:
        pool = study.at_once = Jobs(study, jobs)
    try:
        with ThreadPoolExecutor(jobs if pool else 1) as threads:
            made = [threads.submit(make, row) for row in wanted]  # one that fails stops no other
        for row in made:
            row.result()
    finally:
        if pool is not None:
            pool.close()
