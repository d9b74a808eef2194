"""``weightclip-study text``: SST-2 with a pretrained sentence encoder, privately."""

from __future__ import annotations

import re
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
    epochs: Annotated[int, typer.Option(help="passes over the data (half for large parts and ceilings)", min=1)] = 8,
    batch: Annotated[int, typer.Option(help="expected batch size", min=1)] = 4096,
    piece: Annotated[int | None, typer.Option(help="records of a physical batch", min=1)] = None,
    length: Annotated[int, typer.Option(help="tokens read of a training sentence", min=8, max=64)] = 32,
    rank: Annotated[int, typer.Option(help="rank of the updates of --part lora", min=1)] = 16,
    layers: Annotated[int, typer.Option(help="layers that --part last trains", min=1, max=6)] = 1,
    records: Annotated[int | None, typer.Option(help="train on the first so many sentences only", min=100)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one")] = "",
    jobs: Annotated[int, typer.Option(help="runs at the same time, each in a process of its own", min=1)] = 1,
    within: Annotated[
        float | None, typer.Option(help="end within so many seconds; 0: rows of what was run before", min=0)
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="everything that tunes the encoder, the most important first")
    ] = False,
    recipes: Annotated[bool, typer.Option("--recipes", help="compare recipes on the dev part; make no rows")] = False,
    timing: Annotated[
        bool, typer.Option("--timing", help="time a few steps of each method; make no rows (with --plan: of all)")
    ] = False,
    canaries: Annotated[
        int, typer.Option(help="audit one run of each row by so many inserted sentences; make no rows", min=0)
    ] = 0,
    site: Annotated[
        Path | None, typer.Option(help="with --prepare: copy packages that a bare machine lacks into SITE/site")
    ] = None,
    prepare: Annotated[bool, typer.Option("--prepare", help="write the encoder and the tokens, train nothing")] = False,
    prepared: Annotated[Path, typer.Option(help="folder that --prepare writes")] = Path("runs/text/prepared"),
    runs: Annotated[Path, typer.Option(help="folder that keeps every trial")] = Path("runs/text"),
    page: Annotated[
        Path | None, typer.Option(help="Markdown page whose tables are written from --out at the end")
    ] = None,
    out: Annotated[Path, typer.Option(help="CSV file; other rows in it are kept")] = Path("runs/text/sst2.csv"),
) -> None:
    """Fine-tune MiniLM on SST-2: settings chosen on the dev part by the same trials for all, test part read once.

    First --prepare, then --part lora --epsilon 8 --method cap --method opacus --jobs 3, say. Whatever was run before is
    read from --runs and not run again: a study that was interrupted goes on by the same command.

    Example: weightclip-study text --plan --within 540 --jobs 4
    """
    import torch

    from weightclip.text import load_encoder
    from weightclip_studies.images._pieces import pack_packages
    from weightclip_studies.text import (
        METHODS,
        SPLITS,
        Audit,
        Full,
        Head,
        Last,
        Lora,
        Part,
        Prepared,
        Recipes,
        Rows,
        Runner,
        Stage,
        Study,
        Timing,
        calibrate,
        load_sst2,
        recipes_of,
        timings,
        write_page,
    )
    from weightclip_studies.text import plan as all_stages
    from weightclip_studies.text import prepare as write_prepared

    parts: dict[str, Part] = {"head": Head(), "lora": Lora(rank), "last": Last(layers), "full": Full()}
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
    if plan and (part or method or epsilon or canaries or recipes):
        raise WeightclipError("--plan chooses parts, methods and budgets: leave those options out.")
    if site and not prepare:
        raise WeightclipError("--site goes with --prepare.")
    names, methods, budgets = part or ["head"], method or list(METHODS), epsilon or [8.0, 3.0, 1.0]
    stages: list[Stage] = []
    if plan:
        stages = list((timings if timing else all_stages)(Lora(rank), Last(layers), Full()))
    elif timing:
        stages = [Timing(parts[n], tuple(dict.fromkeys(["non-private", *methods]))) for n in names]
    elif recipes:
        tried = [parts[n] for n in part or ["lora"]]
        if any(one.name not in ("head", "lora") for one in tried):
            raise WeightclipError("--recipes: they are tried on --part head or lora.")
        stages = [Recipes(recipes_of(one), e, one) for one in tried for e in budgets]
    elif canaries:
        private = [m for m in methods if m not in ("opacus", "non-private")]
        stages = [Audit(parts[n], way, e, canaries) for n in names for e in budgets for way in private]
    else:
        for n in names:
            for e in budgets:
                ceiling = [(parts[n], "non-private", None)] if "non-private" in methods and e == budgets[0] else []
                stages.append(Rows((*((parts[n], w, e) for w in methods if w != "non-private"), *ceiling)))
    if prepare:
        features = "head" in names and not plan
        if site:
            pack_packages(site)
        write_prepared(prepared, load_encoder("minilm"), {s: load_sst2(s) for s in SPLITS}, features)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    until = float("inf") if within is None else time.time() + within if within else 0.0
    study = Study(Prepared(prepared), runs, place, epochs, batch, piece, length, records, until)
    if prepare:
        found = len(list(calibrate(study, stages)))  # seconds each, which a GPU need not wait for
        print(f"{prepared}; {found} noise multipliers in {runs}")
        return
    Runner(study, seeds, jobs, out, Console(stderr=True).print).run(stages)
    if page:
        write_page(page, out)
    print(out)
