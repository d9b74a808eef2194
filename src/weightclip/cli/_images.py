"""`weightclip reproduce images` and `reproduce runtime`: the image half of the paper's experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from weightclip.errors import WeightclipError

OutOption = Annotated[Path, typer.Option(help="Folder the results are written to.")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON summary instead of text.")]
_OUT = Path("results/images")


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise WeightclipError("--device cuda: torch sees no GPU here.")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def images(
    out: OutOption = _OUT,
    datasets: Annotated[str, typer.Option(help="Comma-separated: mnist, fashion_mnist, cifar10.")] = "",
    methods: Annotated[str, typer.Option(help="Comma-separated methods; all by default.")] = "",
    trials: Annotated[int, typer.Option(help="Random settings tried for each method and epsilon.", min=1)] = 6,
    seeds: Annotated[int, typer.Option(help="Seeds of each chosen setting.", min=1)] = 5,
    hidden: Annotated[int, typer.Option(help="Hidden units of the dense head.", min=1)] = 128,
    linear: Annotated[str, typer.Option(help="Methods that also train a linear head; '' for none.")] = (
        "lip-weights,dp-sgd,non-private"
    ),
    keep_features: Annotated[bool, typer.Option(help="Use the features of the results already there.")] = False,
    limit: Annotated[int | None, typer.Option(help="Use only so many records (for a first look).", min=200)] = None,
    figure: Annotated[bool, typer.Option(help="Draw the figure only, from the results already there.")] = False,
    device: DeviceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Accuracy against epsilon on MNIST, Fashion-MNIST and CIFAR-10: chosen on validation, tested once per seed."""
    from weightclip.study.images._experiment import EPSILONS, ImageStudy, chosen_features
    from weightclip.study.images._plots import accuracy_figure
    from weightclip.study.images._search import METHODS

    wanted = _names(datasets, tuple(EPSILONS), "datasets")
    chosen = _names(methods, METHODS, "methods")
    heads = [] if not linear else _names(linear, METHODS, "linear")
    if limit is not None and out == _OUT:
        out = Path("runs/quick/images")  # a first look never replaces results
    for name in () if figure else wanted:
        ImageStudy(
            name, out, _device(device), trials=trials, seeds=seeds, hidden=hidden, methods=chosen, linear_methods=heads,
            features=chosen_features(out, name) if keep_features else None, limit=limit,
            say=lambda line: typer.echo(line, err=True),
        ).run()  # fmt: skip
    path = accuracy_figure(out / "accuracy.csv", out / "accuracy.png")
    typer.echo(json.dumps({"files": [str(out / "accuracy.csv"), str(path)]}) if as_json else f"written to {out}")


def runtime(
    out: OutOption = _OUT,
    models: Annotated[str, typer.Option(help="Comma-separated: convnet, wrn-16-4.")] = "",
    batches: Annotated[
        str, typer.Option(help="Comma-separated logical batch sizes; the paper's range by default.")
    ] = "",
    modes: Annotated[str, typer.Option(help="Comma-separated modes; all by default.")] = "",
    seconds: Annotated[float, typer.Option(help="Measuring time per mode.")] = 1.0,
    tf32: Annotated[bool, typer.Option(help="TF32 products in every mode.")] = False,
    figure: Annotated[bool, typer.Option(help="Draw the figure only, from the results already there.")] = False,
    device: DeviceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Seconds per epoch and peak memory against batch size: plain training, weightclip, Opacus hooks and ghost."""
    from weightclip.study.images._plots import runtime_figure
    from weightclip.study.images._runtime import MODES, SUBJECTS, run

    if not figure:
        try:
            sizes = [int(b) for b in batches.split(",") if b.strip()] or None
        except ValueError as error:
            raise typer.BadParameter(f"{batches!r} is no list of whole numbers", param_hint="--batches") from error
        run(
            out, _device(device), batches=sizes, models=_names(models, tuple(SUBJECTS), "models"),
            modes=_names(modes, tuple(MODES), "modes"), seconds=seconds, tf32=tf32,
            say=lambda line: typer.echo(line, err=True),
        )  # fmt: skip
    path = runtime_figure(out / "runtime.csv", out / "runtime.png")
    typer.echo(json.dumps({"files": [str(out / "runtime.csv"), str(path)]}) if as_json else f"written to {out}")


def _names(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()] or list(allowed)
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"unknown {name!r}: choose from {', '.join(allowed)}", param_hint=f"--{option}")
    return names


def register(app: typer.Typer) -> None:
    """Add both commands to the `reproduce` application."""
    app.command()(images)
    app.command()(runtime)
