"""From a recipe to weights in a folder, in a given time, perhaps over several calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from weightclip_studies.images.extractor._contrast import ContrastiveTraining, Recipe
from weightclip_studies.images.extractor._samples import contact_sheet
from weightclip_studies.images.extractor._weights import Stored, describe_extractor, save_extractor


def extractor_name(width: int, seed: int) -> str:
    """Name of an extractor's files."""
    return f"resnet9-{width}-seed{seed}"


def train_extractor(
    recipe: Recipe,
    folder: Path,
    work: Path,
    device: str = "cpu",
    minutes: float | None = None,
    within: float = math.inf,
    say: Callable[[str], None] = print,
) -> Stored | None:
    """Train, and write weights and a sheet of pictures; what is finished in ``folder`` is not made again.

    Args:
        recipe: What to train.
        folder: Of weights.
        work: Of checkpoints, and of the weights at the last one in ``snapshot``, for a machine that may go away.
        device: "cpu" or "cuda".
        minutes: Length of the whole training, over all calls; None: by the recipe's steps.
        within: Seconds after which this call stops at a checkpoint.
        say: Told how far it has come.

    Returns:
        The extractor, or None when time was over before the last step.
    """
    name = extractor_name(recipe.width, recipe.seed)
    if (Path(folder) / f"{name}.json").exists():
        return describe_extractor(folder, name)
    training = ContrastiveTraining(recipe, device, work, None if minutes is None else 60 * minutes, say=say)
    contact_sheet(training.images[_spread(recipe)], Path(folder) / f"{name}.png")

    def save(into: Path) -> Stored:
        return save_extractor(
            into, name, training.result(), training.taken(), seconds=round(training.seconds, 1),
            device=torch.cuda.get_device_name() if device == "cuda" else "cpu", done=round(min(1.0, training.done), 4),
            loss=round(training.losses[-1][1], 4), torch=torch.__version__,
        )  # fmt: skip

    if not training.run(within, lambda: save(Path(work) / "snapshot")):
        say(f"{name}: stopped at step {training.step}, {training.done:.1%}; the same command goes on")
        return None
    return save(Path(folder))


def _spread(recipe: Recipe) -> torch.Tensor:
    """Numbers of 128 pictures, of both kinds: evenly over the first chunk."""
    first = min(recipe.images, recipe.processes.chunk)
    return torch.linspace(0, first - 1, min(128, first)).long()
