"""`weightclip-study reproduce images`, `features`, `convolutions`, `runtime`: the image half of the experiments."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

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
    hidden: Annotated[
        int, typer.Option(help="Hidden units of the dense head; 0 trains linear heads only.", min=0)
    ] = 128,
    linear: Annotated[str, typer.Option(help="Methods that also train a linear head; '' for none.")] = (
        "lip-weights,dp-sgd,non-private"
    ),
    keep_features: Annotated[bool, typer.Option(help="Use the features of the results already there.")] = False,
    limit: Annotated[int | None, typer.Option(help="Use only so many records (for a first look).", min=200)] = None,
    figure: Annotated[bool, typer.Option(help="Draw the figure only, from the results already there.")] = False,
    audit: Annotated[bool, typer.Option(help="Audit the private heads of the results already there.")] = False,
    device: DeviceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Accuracy against epsilon on MNIST, Fashion-MNIST and CIFAR-10: chosen on validation, tested once per seed.

    Example: weightclip-study reproduce images --datasets mnist
    """
    from weightclip_studies.images._engine import audit_results
    from weightclip_studies.images._experiment import EPSILONS, ImageStudy, chosen_features
    from weightclip_studies.images._plots import accuracy_figure
    from weightclip_studies.images._search import METHODS

    wanted = _names(datasets, tuple(EPSILONS), "datasets")
    chosen = _names(methods, METHODS, "methods")
    heads = [] if not linear else _names(linear, METHODS, "linear")
    if limit is not None and out == _OUT:
        out = Path("runs/quick/images")  # a first look never replaces results
    if audit:
        rows = audit_results(out)
        typer.echo(
            json.dumps({"rows": rows}) if as_json else f"{len(rows)} heads audited, rows in {out / 'audit.json'}"
        )
        return
    for name in () if figure else wanted:
        ImageStudy(
            name, out, _device(device), trials=trials, seeds=seeds, hidden=hidden, methods=chosen, linear_methods=heads,
            features=chosen_features(out, name) if keep_features else None, limit=limit,
            say=lambda line: typer.echo(line, err=True),
        ).run()  # fmt: skip
    path = accuracy_figure(out / "accuracy.csv", out / "accuracy.png")
    typer.echo(json.dumps({"files": [str(out / "accuracy.csv"), str(path)]}) if as_json else f"written to {out}")


def features(
    out: OutOption = _OUT,
    limit: Annotated[int | None, typer.Option(help="Use only so many records (for a first look).", min=200)] = None,
    device: DeviceOption = "",
    as_json: JsonOption = False,
) -> None:
    """What each part of the fixed features adds on CIFAR-10: validation accuracy of a linear head, one seed.

    Example: weightclip-study reproduce features
    """
    from weightclip_studies.images._ablation import run

    if limit is not None and out == _OUT:
        out = Path("runs/quick/images")  # a first look never replaces results
    run(out, _device(device), limit=limit, say=lambda line: typer.echo(line, err=True))
    path = out / "ablation.csv"
    typer.echo(json.dumps({"files": [str(path)]}) if as_json else f"written to {path}")


def runtime(
    out: OutOption = _OUT,
    models: Annotated[str, typer.Option(help="Comma-separated: convnet, wrn-16-4.")] = "",
    batches: Annotated[
        str, typer.Option(help="Comma-separated logical batch sizes; the paper's range by default.")
    ] = "",
    modes: Annotated[str, typer.Option(help="Comma-separated modes; all by default, CUDA graphs on CUDA.")] = "",
    seconds: Annotated[float, typer.Option(help="Measuring time per mode.")] = 1.0,
    tf32: Annotated[bool, typer.Option(help="TF32 products in every mode.")] = False,
    real: Annotated[
        bool, typer.Option(help="Whole steps on MNIST and CIFAR-10, in physical batches (runtime_real.csv).")
    ] = False,
    views: Annotated[int, typer.Option(help="With --real: augmented views of each record.", min=1)] = 1,
    physical: Annotated[int, typer.Option(help="With --real: rows of one pass, views counted.", min=1)] = 1024,
    limit: Annotated[int | None, typer.Option(help="With --real: use only so many records.", min=100)] = None,
    figure: Annotated[bool, typer.Option(help="Draw the figure only, from the results already there.")] = False,
    device: DeviceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Seconds per epoch and peak memory against batch size: plain training, weightclip, Opacus.

    Example: weightclip-study reproduce runtime --real --views 4 --physical 1024
    """
    if real:
        files = _runtime_real(out, models, batches, modes, views, physical, limit, figure, _device(device))
        typer.echo(json.dumps({"files": files}) if as_json else f"written to {out}")
        return
    from weightclip_studies.images._plots import runtime_figure
    from weightclip_studies.images._runtime import MODES, SUBJECTS, run

    if not figure:
        sizes = _sizes(batches) or None
        run(
            out, _device(device), batches=sizes, models=_names(models, tuple(SUBJECTS), "models"),
            modes=_names(modes, tuple(MODES), "modes") if modes else None, seconds=seconds, tf32=tf32,
            say=lambda line: typer.echo(line, err=True),
        )  # fmt: skip
    path = runtime_figure(out / "runtime.csv", out / "runtime.png")
    typer.echo(json.dumps({"files": [str(out / "runtime.csv"), str(path)]}) if as_json else f"written to {out}")


def _runtime_real(
    out: Path, models: str, batches: str, modes: str, views: int, physical: int, limit: int | None, draw: bool,
    device: str,
) -> list[str]:  # fmt: skip
    """Rows on real data and their picture; the picture is left out where matplotlib is missing."""
    from weightclip_studies.figure import BATCHES, PACE_MODES, SUBJECTS, Pace
    from weightclip_studies.images._plots import runtime_figure

    table, picture = out / "runtime_real.csv", out / "runtime_real.png"
    if not draw:
        sizes = _sizes(batches) or list(BATCHES)
        named = _names(models, tuple(SUBJECTS), "models")
        ways = _names(modes, tuple(PACE_MODES), "modes")
        pace = Pace(table, device, views, physical, limit=limit, say=lambda line: typer.echo(line, err=True))
        pace.run([SUBJECTS[m] for m in named], sizes, ways)
    if importlib.util.find_spec("matplotlib") is None:
        return [str(table)]
    return [str(table), str(runtime_figure(table, picture))]


def _sizes(text: str) -> list[int]:
    try:
        return [int(b) for b in text.split(",") if b.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers", param_hint="--batches") from error


def convolutions(
    out: OutOption = _OUT,
    logs: Annotated[Path, typer.Option(help="Folder of the trials; finished trials in it are not made again.")] = Path(
        "runs/convolutions"
    ),
    dataset: Annotated[str, typer.Option(help="mnist, fashion_mnist or cifar10.")] = "cifar10",
    network: Annotated[str, typer.Option(help="small-cnn, scattering+cnn or wrn-16-4.")] = "small-cnn",
    bounds: Annotated[str, typer.Option(help="Comma-separated ways of bounding; caps and Opacus by default.")] = (
        "free,late,exact,opacus"
    ),
    epsilons: Annotated[str, typer.Option(help="Comma-separated.")] = "3",
    trials: Annotated[int, typer.Option(help="Settings tried for each row; 1 chooses nothing.", min=1, max=4)] = 4,
    seeds: Annotated[int, typer.Option(help="Seeds of each chosen setting.", min=1)] = 5,
    change: Annotated[list[str] | None, typer.Option(help="A field of every setting, as name=value.")] = None,
    cost: Annotated[int, typer.Option(help="Instead, time a step of each bound with this batch.", min=0)] = 0,
    limit: Annotated[int | None, typer.Option(help="Use only so many records (for a first look).", min=200)] = None,
    audit: Annotated[bool, typer.Option(help="Audit every network and bound of the results already there.")] = False,
    figure: Annotated[bool, typer.Option(help="Draw the figure only, from the results already there.")] = False,
    design: Annotated[
        bool, typer.Option(help="Instead, how a network's design moves its bounds (no training).")
    ] = False,
    device: DeviceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Convolutional networks by the engine and by Opacus: accuracy at an epsilon, and what a tighter cap costs.

    Example: weightclip-study reproduce convolutions
    """
    from weightclip_studies.images import _audit
    from weightclip_studies.images._convolutions import CHOSEN, Cell, ConvStudy, collect, write_costs
    from weightclip_studies.images._convolutions import cost as measure
    from weightclip_studies.images._design import design_study
    from weightclip_studies.images._nets import NETWORKS
    from weightclip_studies.images._plots import caps_figure
    from weightclip_studies.images._training import BOUNDS

    ways = _names(bounds, tuple(BOUNDS), "bounds")
    _names(network, tuple(NETWORKS), "network")
    changes = _changes(change or [])
    if limit is not None and out == _OUT:
        out = Path("runs/quick/images")  # a first look never replaces results
    out.mkdir(parents=True, exist_ok=True)
    if audit:
        rows = _audit.audit_networks(out)
        worst = max((max(r["falsifier"], r["one_step"]) for r in rows if "bound" in r), default=0.0)
        typer.echo(json.dumps({"largest": worst}) if as_json else f"largest share of a bound that was found: {worst}")
        return
    if figure or design:
        if design:
            design_study(out, say=lambda line: typer.echo(line, err=True))
        if figure:
            caps_figure(out / "caps.csv", out / "conv_tightness.csv", out / "caps.png")
        typer.echo(f"written to {out}")
        return
    study = ConvStudy(dataset, logs, _device(device), limit=limit, say=lambda line: typer.echo(line, err=True))
    if cost:
        data = study.pictures(network)[0]
        write_costs(
            out, measure(data, dataset, network, ["plain", *(b for b in ways if b != "plain")], cost, **changes)
        )
        typer.echo(f"written to {out / 'conv_cost.csv'}")
        return
    entries = []
    for epsilon in (float(e) for e in epsilons.split(",")):
        for way in ways:
            level = None if way == "plain" else epsilon
            entries.append(study.run(Cell(network, way, level, trials, seeds, tuple(changes.items())), watch=5))
            collect(entries, out)
    typer.echo(json.dumps({"files": [str(out / CHOSEN)]}) if as_json else f"written to {out}")


def _changes(texts: list[str]) -> dict[str, Any]:
    """Fields of `ConvSettings` given as name=value, in the type of their default."""
    from weightclip_studies.images._training import ConvSettings

    fields = ConvSettings().to_dict()
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in fields or not value:
            raise typer.BadParameter(f"{text!r}: name one of {', '.join(fields)} as name=value", param_hint="--change")
        default = fields[name]
        kind = float if default is None else type(default)
        found[name] = value == "true" if isinstance(default, bool) else kind(value)
    return found


def _names(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()] or list(allowed)
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"unknown {name!r}: choose from {', '.join(allowed)}", param_hint=f"--{option}")
    return names


def register(app: typer.Typer) -> None:
    """Add the commands to the `reproduce` application."""
    app.command()(images)
    app.command()(convolutions)
    app.command()(features)
    app.command()(runtime)
