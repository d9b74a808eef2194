"""``weightclip train``: a private model from a table in a file."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table as Grid

from weightclip.errors import WeightclipError


def train(
    data: Annotated[Path, typer.Argument(help="table: .csv, .tsv (also .gz), .parquet, .arrow or .feather")],
    target: Annotated[str, typer.Option(help="column to predict")],
    epsilon: Annotated[float, typer.Option(help="privacy budget, preprocessing included")],
    out: Annotated[Path, typer.Option(help="model folder to write")],
    delta: Annotated[float | None, typer.Option(help="its delta (default 1/n^2, rounded down)")] = None,
    schema: Annotated[Path | None, typer.Option(help="JSON file: types, public ranges and categories")] = None,
    task: Annotated[str, typer.Option(help="classification or regression")] = "classification",
    classes: Annotated[str | None, typer.Option(help="public class labels, separated by commas")] = None,
    target_range: Annotated[str | None, typer.Option(help="public range of a numeric target, as LOW,HIGH")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="column to leave out (repeatable)")] = None,
    categorical: Annotated[list[str] | None, typer.Option(help="column to treat as categorical (repeatable)")] = None,
    text: Annotated[str | None, typer.Option(help="text column, read through --encoder; others are left out")] = None,
    encoder: Annotated[str, typer.Option(help="public sentence encoder for --text: minilm")] = "minilm",
    finetune: Annotated[str | None, typer.Option(help="train the encoder too: lora (low-rank updates)")] = None,
    rank: Annotated[int | None, typer.Option(help="rank of the updates of --finetune lora (default 8)")] = None,
    tokens: Annotated[int | None, typer.Option(help="tokens of a text that --finetune reads (default 64)")] = None,
    hidden: Annotated[str | None, typer.Option(help="hidden widths like 32,16; 'none' for a linear model")] = None,
    epochs: Annotated[float | None, typer.Option(help="passes over the data")] = None,
    public_scaling: Annotated[bool, typer.Option(help="scale by public ranges alone, pay nothing for it")] = False,
    non_private_scaling: Annotated[bool, typer.Option(help="read feature statistics UNPAID (epsilon = inf)")] = False,
    n_records: Annotated[
        int | None, typer.Option(help="public number of records, if the true one is private", min=1)
    ] = None,
    delimiter: Annotated[str | None, typer.Option(help="of delimited text (default comma, tab for .tsv)")] = None,
    seed: Annotated[int | None, typer.Option(help="repeatable noise, for experiments only")] = None,
    accountant: Annotated[str, typer.Option(help="pld or rdp")] = "pld",
    overwrite: Annotated[bool, typer.Option(help="replace an older model folder")] = False,
    ledger: Annotated[
        Path | None, typer.Option(help="file that counts every release before it happens; epsilon is its total")
    ] = None,
    resume: Annotated[bool, typer.Option(help="go on with a run that was interrupted (needs --ledger)")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the privacy report as JSON")] = False,
) -> None:  # fmt: skip
    """Train a private model on a table and write a model folder.

    Example: weightclip train data.csv --target income --epsilon 1 --out model/
    Example: weightclip train reviews.csv --text review --target label --epsilon 3 --out model/ --finetune lora
    """
    from weightclip.noise import Streams
    from weightclip.tabular import (
        Checkpoint,
        FitPlan,
        NonPrivateScaling,
        PrivateScaling,
        PublicScaling,
        check_budget,
        fit_classifier,
        fit_regressor,
    )
    from weightclip.tabular import defaults as _defaults
    from weightclip.tabular import files as _files
    from weightclip.tabular import folder as _folder
    from weightclip.text import TextFile, TokenFile, fit_lora, load_encoder

    regression = _task(task)
    if public_scaling and non_private_scaling:
        raise WeightclipError("--public-scaling and --non-private-scaling exclude each other.")
    check_budget(epsilon, delta, "--epsilon", "--delta")
    _check_settings(accountant, epochs, seed, hidden)
    if text is not None and (public_scaling or non_private_scaling or categorical):
        raise WeightclipError("--text reads one column by a public scale: leave scaling options and --categorical out.")
    lora = _finetuned(finetune, rank, tokens, text, regression, hidden, ledger, resume)
    known = _schema(target, regression, schema, classes, target_range, ignore, categorical)
    _folder.check_place(out, overwrite, "--out ")
    kept = _resumable(out, ledger, resume, non_private_scaling)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        reading = bar.add_task("reading", total=None)
        source: _files.Source = _files.File(data, delimiter)
        how = NonPrivateScaling() if non_private_scaling else PublicScaling() if public_scaling else PrivateScaling()
        if text is not None:
            public, kind = load_encoder(encoder), TextFile
            if lora is not None:
                public, kind = replace(public, longest=lora.tokens), TokenFile
            source = kind(source, text, public, lambda done: bar.update(reading, completed=done))
            known, how = source.schema(known, target), PublicScaling(pieces=1)
            source.check(None if regression or known.classes else target)
        loaded = _files.load(source, target, known, regression)
        bar.remove_task(reading)
        n = len(loaded.table) if n_records is None else n_records
        steps, described = bar.add_task("training", total=None), False

        def shown(done: int, total: int) -> None:
            nonlocal described
            if text is None and not (described or as_json):
                console.print(_types(loaded))  # training has begun: nothing was wrong with the table or the options
            described = True
            bar.update(steps, completed=done, total=total)

        chosen: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
        if hidden is not None:
            chosen["hidden_layer_sizes"] = _widths(hidden)
        notes = loaded.notes(delta, n_records)
        if text is not None:
            notes.append(f"the encoder {encoder!r} counts as public: no record was used to train it")
        plan = FitPlan(
            epsilon, _defaults.delta(n) if delta is None else delta, how, chosen, accountant,
            Streams.secure() if seed is None else Streams.seeded(seed), progress=shown, not_covered=tuple(notes),
            records=n_records, ledger=ledger,
            checkpoint=None if kept is None else Checkpoint(kept, _options(locals())),
        ).counted()  # fmt: skip
        updates: dict[str, Any] = {}  # of a fine-tuned encoder
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if n * epsilon < 200:
                warnings.warn(
                    f"{n} records at epsilon {epsilon:g} teach a model next to nothing: expect chance.",
                    stacklevel=1,
                )
            if regression:
                model, report, _ = fit_regressor(loaded.table, loaded.target, known.target_range, target, plan)
            else:
                if len(loaded.classes) > 100:
                    warnings.warn(
                        f"{len(loaded.classes)} classes share one budget: expect little accuracy.", stacklevel=1
                    )
                labels = loaded.codes(), loaded.classes, target
                if isinstance(source, TokenFile) and lora is not None:
                    tuned = fit_lora(loaded.table.values, *labels, source.text, source.encoder, lora, plan)
                    model, report, updates = tuned.model, tuned.report, tuned.update.tensors()
                else:
                    model, report, _ = fit_classifier(loaded.table, *labels, plan)
        pipeline = model.pipeline()
        if isinstance(source, TextFile):
            pipeline["text"] = {**source.described(), **({} if lora is None else {"lora": lora.described()})}
        _folder.save(out, {**model.tensors(), **updates}, pipeline, report, overwrite=overwrite)
        if kept is not None:
            shutil.rmtree(kept, ignore_errors=True)
    for warning in caught:
        console.print(f"[yellow]warning:[/yellow] {escape(str(warning.message))}", highlight=False)
    if as_json:
        print(json.dumps(report))
    else:
        print(f"{out}: {report['statement']}")


def _resumable(out: Path, ledger: Path | None, resume: bool, unpaid: bool) -> Path | None:
    """The folder beside the model in which an interrupted run is found again; None without a ledger."""
    if ledger is None:
        if resume:
            raise WeightclipError("--resume needs --ledger: only a ledger knows what an interrupted run has released.")
        return None
    if unpaid:
        raise WeightclipError("--ledger and --non-private-scaling exclude each other: no ledger can count that.")
    kept = Path(os.path.abspath(out))
    kept = kept.with_name(kept.name + ".resume")
    if kept.exists() and not resume:
        raise WeightclipError(f"a run for --out {out} was interrupted: go on with --resume, or remove {kept}.")
    if kept.is_symlink() or (kept.exists() and not kept.is_dir()):
        raise WeightclipError(f"{kept} is no folder of an interrupted run: move it away.")
    return kept


def _finetuned(
    what: str | None, rank: int | None, tokens: int | None, text: str | None, regression: bool, hidden: str | None,
    ledger: Path | None, resume: bool,
):  # fmt: skip
    """What is trained of the encoder; None where it stays as it is."""
    if what is None:
        if rank is not None or tokens is not None:
            raise WeightclipError("--rank and --tokens belong to --finetune lora.")
        return None
    from weightclip.text import Lora

    if what != "lora":
        raise WeightclipError(f"--finetune must be lora, got {what!r}; leave it out to keep the encoder as it is.")
    if text is None:
        raise WeightclipError("--finetune trains the encoder of a text column: name the column by --text.")
    if regression:
        raise WeightclipError("--finetune trains classifiers: leave it out for --task regression.")
    if hidden is not None:
        raise WeightclipError("--finetune puts one layer on the encoder: leave --hidden out.")
    if ledger is not None or resume:
        raise WeightclipError("--finetune keeps no ledger and cannot be resumed: leave --ledger and --resume out.")
    return Lora(Lora.rank if rank is None else rank, Lora.tokens if tokens is None else tokens)


def _options(given: dict[str, Any]) -> str:
    """What a run is resumed with must be what it was started with."""
    names = ("target", "epsilon", "delta", "task", "known", "hidden", "epochs", "n", "how", "seed", "accountant")
    return repr([(name, given[name]) for name in names])


def _task(task: str) -> bool:
    if task not in ("classification", "regression"):
        raise WeightclipError(f"--task must be classification or regression, got {task!r}.")
    return task == "regression"


def _schema(target: str, regression: bool, path, classes, target_range, ignore, categorical):
    from weightclip.tabular import Column, Schema

    known = Schema() if path is None else Schema.read(path)
    if known.column(target) is not None:
        raise WeightclipError(f"the schema describes {target!r} as a feature, but it is the target.")
    if target in known.ignore or target in (ignore or ()):
        raise WeightclipError(f"column {target!r} is ignored (--ignore or the schema), but it is the target.")
    if target in (categorical or ()):
        raise WeightclipError(f"--categorical {target!r}: that is the target; its labels are classes already.")
    if classes is not None:
        labels = tuple(c.strip() for c in classes.split(","))
        if "" in labels or len(labels) < 2:
            raise WeightclipError(f"--classes must be two or more labels, separated by commas; got {classes!r}.")
        if len(set(labels)) != len(labels):
            raise WeightclipError("--classes lists a label twice.")
        known = replace(known, classes=labels)
    elif known.classes is not None and len(set(known.classes)) != len(known.classes):
        raise WeightclipError("the schema lists a class twice.")
    if target_range is not None:
        try:
            low, high = (float(v) for v in target_range.split(","))
        except ValueError:
            raise WeightclipError(f"--target-range must be LOW,HIGH, got {target_range!r}.") from None
        known = replace(known, target_range=(low, high))
        if not -1e300 < low < high < 1e300:
            raise WeightclipError(f"--target-range must be LOW,HIGH with LOW < HIGH, got {target_range!r}.")
    if regression and known.classes is not None:
        raise WeightclipError("--classes belongs to classification; for a numeric target give --target-range.")
    if not regression and known.target_range is not None:
        raise WeightclipError("--target-range belongs to --task regression.")
    if both := set(ignore or ()) & {*(categorical or ()), *(c.name for c in known.columns)}:
        raise WeightclipError(f"column {min(both)!r} is described and ignored: choose one.")
    other = [c.name for c in known.columns if c.name in (categorical or ()) and c.kind != "categorical"]
    if other:
        raise WeightclipError(f"--categorical {other[0]!r}: the schema gives it another type.")
    extra = tuple(Column(c, "categorical") for c in dict.fromkeys(categorical or ()) if known.column(c) is None)
    return replace(known, columns=known.columns + extra, ignore=known.ignore + tuple(ignore or ()))


def _check_settings(accountant: str, epochs: float | None, seed: int | None, hidden: str | None) -> None:
    """Refuse options that would fail only after the table was read."""
    if accountant not in ("pld", "rdp"):
        raise WeightclipError(f"--accountant must be pld or rdp, got {accountant!r}.")
    if epochs is not None and not 0 < epochs <= 1e6:
        raise WeightclipError(f"--epochs must be a number above 0 (at most a million), got {epochs:g}.")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise WeightclipError(f"--seed must be a whole number from 0 to 2^63 - 1, got {seed}.")
    if hidden is not None:
        _widths(hidden)


def _widths(text: str) -> tuple[int, ...]:
    if text.lower() in ("none", ""):
        return ()
    try:
        widths = tuple(int(v) for v in text.split(","))
    except ValueError:
        widths = (0,)
    if min(widths) < 1 or max(widths) > 1 << 16 or len(widths) > 64:
        raise WeightclipError(f"--hidden must be widths like 16 or 32,16, or none; got {text!r}.")
    return widths


def _types(loaded) -> Grid:
    grid = Grid(title="columns", title_justify="left")
    for head in ("name", "type", "public", "type from"):
        grid.add_column(head)
    for c in loaded.table.columns:
        public = f"[{c.low:g}, {c.high:g}]" if c.bounded else f"{len(c.categories)} categories" if c.categories else "-"
        grid.add_row(escape(c.name), c.kind, escape(public), "values" if c.name in loaded.inferred else "declared")
    return grid
