"""``weightclip-study extractor``: image features learned from random processes, and private heads on them."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from weightclip.errors import WeightclipError
from weightclip_studies.cli._images import DeviceOption, OutOption, _device, _names

_HELP = """Image features learned from random processes alone: train the network, look at it, train private heads on it.

Example: weightclip-study extractor train --minutes 4
"""
app = typer.Typer(help=_HELP, no_args_is_help=True)

_WEIGHTS = Path("results/images/extractor")
_NOISE = Path("results/images/noise.json")
_WORK = Path("runs/extractor")
WorkOption = Annotated[Path, typer.Option(help="Folder of checkpoints; the same command goes on from it.")]
SeedOption = Annotated[int, typer.Option(help="Seed of pictures, first weights, batches and views.", min=0)]
WidthOption = Annotated[int, typer.Option(help="Channels of the network's first stage.", min=2)]
ImagesOption = Annotated[int, typer.Option(help="Synthetic pictures to learn from.", min=2)]
PairsOption = Annotated[int, typer.Option(help="Pictures of a batch, two views of each.", min=2)]
TrialsOption = Annotated[int, typer.Option(help="Heads tried for each row, the same number for all.", min=1)]
SeedsOption = Annotated[int, typer.Option(help="Seeds of each chosen head.", min=1)]
SetsOption = Annotated[str, typer.Option(help="Comma-separated: cifar10, fashion_mnist, mnist.")]
MethodsOption = Annotated[str, typer.Option(help="Comma-separated: lip-weights, dp-sgd, non-private.")]
ShareOption = Annotated[float, typer.Option(help="Squared weight of the learned block where it is joined.")]
LimitOption = Annotated[int | None, typer.Option(help="Use only so many records (for a first look).", min=200)]
ChunkOption = Annotated[
    int | None, typer.Option(help="Records of a pass, untried; by default tried on synthetic pictures.", min=1)
]
WithinOption = Annotated[float, typer.Option(help="Seconds of this call; the same command goes on.")]


def _say(line: str) -> None:
    typer.echo(line, err=True)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder of the weights.")] = _WEIGHTS,
    work: WorkOption = _WORK,
    seed: SeedOption = 0,
    width: WidthOption = 64,
    images: ImagesOption = 600_000,
    pairs: PairsOption = 1024,
    minutes: Annotated[float | None, typer.Option(help="Length of the training, 4 by default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Instead, a number of steps.", min=1)] = None,
    within: WithinOption = math.inf,
    device: DeviceOption = "",
) -> None:
    """Train one network by contrast on pictures of random processes; no data set is read.

    Example: weightclip-study extractor train --minutes 4
    """
    from weightclip_studies.images.extractor import Recipe, train_extractor

    if steps is not None and minutes is not None:
        raise WeightclipError("extractor train: give --minutes or --steps, not both.")
    recipe = Recipe(seed=seed, width=width, images=images, pairs=pairs)
    recipe = recipe if steps is None else replace(recipe, steps=steps)
    length = None if steps is not None else (minutes or 4.0)
    stored = train_extractor(recipe, out, work, _device(device), length, within, _say)
    typer.echo("not finished: run it again" if stored is None else f"{out / stored.name}.safetensors {stored.sha256}")


@app.command()
def show(
    weights: Annotated[Path, typer.Option(help="Folder of the weights.")] = _WEIGHTS,
    picture: Annotated[Path | None, typer.Option(help="Also write a sheet of synthetic pictures here (PNG).")] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "",
) -> None:
    """The extractors of a folder, their digests checked; with --picture, what they learn from.

    Example: weightclip-study extractor show --picture runs/pictures.png
    """
    from weightclip_studies.images.extractor import (
        Processes,
        contact_sheet,
        describe_extractor,
        load_extractor,
        pictures,
    )

    if picture is not None:
        made = pictures(128, Processes(), seed, _device(device), source=_device(device))
        typer.echo(contact_sheet(made, picture))
    for path in sorted(weights.glob("*.safetensors")):
        stored = describe_extractor(weights, path.stem)
        load_extractor(weights, path.stem)  # which checks the digest
        facts = ", ".join(f"{key} {value}" for key, value in stored.facts.items())
        typer.echo(f"{stored.name}: {stored.recipe.steps} steps, {facts}, SHA-256 {stored.sha256}")


@app.command()
def heads(
    features: Annotated[str, typer.Option(help="learned, or joined to scattering and patches.")] = "joined",
    extractors: Annotated[str, typer.Option(help="Comma-separated names; all of the folder by default.")] = "",
    weights: Annotated[Path, typer.Option(help="Folder of the weights.")] = _WEIGHTS,
    datasets: SetsOption = "",
    methods: MethodsOption = "lip-weights,dp-sgd,non-private",
    trials: TrialsOption = 24,
    seeds: SeedsOption = 5,
    share: ShareOption = 0.7,
    limit: LimitOption = None,
    chunk: ChunkOption = None,
    within: WithinOption = math.inf,
    out: OutOption = Path("runs/extractor/results"),
    device: DeviceOption = "",
) -> None:
    """Private linear heads on learned features: chosen on validation, tested once per seed.

    Example: weightclip-study extractor heads --features joined --datasets cifar10
    """
    import os

    from weightclip_studies.images import EPSILONS, ImageStudy
    from weightclip_studies.images._climb import METHODS
    from weightclip_studies.images._learned import KINDS, HeadStudy, feature_settings
    from weightclip_studies.images.extractor import PLACES

    (kind,) = _names(features, KINDS, "features")
    until = time.time() + within
    found = sorted(path.stem for path in weights.glob("*.safetensors"))
    if not found:
        raise WeightclipError(f"no extractor in {weights}: train one with weightclip-study extractor train")
    os.environ[PLACES] = str(weights)
    left = []
    for name in _names(datasets, tuple(EPSILONS), "datasets"):
        settings = feature_settings(name, kind, weights, _names(extractors, tuple(found), "extractors"), share)
        study = ImageStudy(name, out, _device(device), seeds=seeds, limit=limit, say=_say)
        if not HeadStudy(study, settings, _names(methods, METHODS, "methods"), trials, until, chunk).run():
            left.append(name)
    typer.echo(f"written to {out}" + (f"; not finished: {', '.join(left)}" if left else ""))


@app.command()
def pack(
    out: Annotated[Path, typer.Option(help="Folder of the pieces; what is in it is replaced.")] = Path("runs/pieces"),
    datasets: SetsOption = "cifar10,fashion_mnist,mnist",
    megabytes: Annotated[float, typer.Option(help="Largest size of a piece.", min=1)] = 45.0,
) -> None:
    """Data and Python packages for `plan` on a machine that holds little more than torch, in pieces to be carried.

    Example: weightclip-study extractor pack --out runs/pieces
    """
    from weightclip_studies.images import EPSILONS
    from weightclip_studies.images._pieces import pack as write
    from weightclip_studies.images._pieces import pack_packages

    for piece in [*write(_names(datasets, tuple(EPSILONS), "datasets"), out, int(megabytes * 1e6)), pack_packages(out)]:
        typer.echo(f"{piece}: {sum(f.stat().st_size for f in piece.rglob('*.*')) / 1e6:.1f} MB")


@app.command()
def noise(
    out: Annotated[Path, typer.Option(help="Table of noise multipliers; those in it are kept.")] = _NOISE,
    datasets: SetsOption = "cifar10,fashion_mnist,mnist",
) -> None:
    """Calibrate the noise of every head that `heads` and `plan` may try, so that no GPU waits for it (minutes).

    Example: weightclip-study extractor noise --datasets mnist
    """
    from weightclip_studies.images import EPSILONS
    from weightclip_studies.images._pieces import calibrate

    typer.echo(calibrate(out, _names(datasets, tuple(EPSILONS), "datasets"), _say))


@app.command()
def plan(
    work: Annotated[Path, typer.Option(help="Folder that stays on the machine.")] = _WORK,
    out: Annotated[Path, typer.Option(help="Folder for what is to be kept.")] = Path("runs/extractor/kept"),
    pieces: Annotated[
        Path | None, typer.Option(help="Folder of `pack`; by default data is looked for as ever.")
    ] = None,
    table: Annotated[Path, typer.Option(help="Table of noise multipliers made by `noise`.")] = _NOISE,
    earlier: Annotated[Path | None, typer.Option(help="Folder of what an earlier machine kept.")] = None,
    nets: Annotated[int, typer.Option(help="Networks, by seed; features use all of them.", min=1)] = 1,
    width: WidthOption = 64,
    images: ImagesOption = 600_000,
    pairs: PairsOption = 1024,
    minutes: Annotated[float, typer.Option(help="Training time of each network.")] = 4.0,
    steps: Annotated[int | None, typer.Option(help="Steps of each, instead of --minutes.", min=1)] = None,
    datasets: SetsOption = "",
    features: Annotated[str, typer.Option(help="Comma-separated: joined, learned.")] = "",
    methods: MethodsOption = "lip-weights,non-private",
    trials: TrialsOption = 24,
    seeds: SeedsOption = 5,
    share: ShareOption = 0.7,
    limit: LimitOption = None,
    chunk: ChunkOption = None,
    within: WithinOption = 520.0,
    device: DeviceOption = "",
) -> None:
    """Train the extractor, then the heads of all sets, in calls of a few minutes; each call goes on where one ended.

    Example: weightclip-study extractor plan --pieces runs/pieces --within 520
    """
    from weightclip_studies.images import EPSILONS
    from weightclip_studies.images._climb import METHODS
    from weightclip_studies.images._learned import KINDS
    from weightclip_studies.images._plan import ORDER, ExtractorPlan
    from weightclip_studies.images.extractor import Recipe

    sets, kinds = _names(datasets, tuple(EPSILONS), "datasets"), _names(features, KINDS, "features")
    recipe = Recipe(width=width, images=images, pairs=pairs)
    recipe = recipe if steps is None else replace(recipe, steps=steps)
    left = ExtractorPlan(
        work, out, _device(device), tuple(replace(recipe, seed=s) for s in range(nets)),
        None if steps else minutes, pieces, earlier, table if table.exists() else None,
        [job for job in ORDER if job[0] in sets and job[1] in kinds], trials, seeds,
        _names(methods, METHODS, "methods"), share, limit, chunk, within, say=_say,
    ).run()  # fmt: skip
    typer.echo(f"left: {', '.join(left)}" if left else "nothing left")


@app.command()
def adopt(
    kept: Annotated[Path, typer.Argument(help="Folder that `plan` kept.")],
    out: OutOption = Path("results/images"),
    weights: Annotated[Path, typer.Option(help="Folder of the weights.")] = _WEIGHTS,
) -> None:
    """Put the rows and weights of a plan beside earlier results, and draw the figure again.

    Example: weightclip-study extractor adopt runs/extractor/kept
    """
    from weightclip_studies.images._plan import adopt as take_over
    from weightclip_studies.images._plots import accuracy_figure

    if not (kept / "results.tar.gz").exists():
        raise WeightclipError(f"{kept} holds no results.tar.gz: give the folder that `extractor plan` kept.")
    found = take_over(kept, out, weights)
    accuracy_figure(out / "accuracy.csv", out / "accuracy.png")
    typer.echo(f"rows of {', '.join(found) or 'no set'} are now in {out}")
