"""From a recipe to weights in a folder, in a given time, perhaps over several calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from weightclip_studies.images.extractor._contrast import ContrastiveTraining, Recipe, earlier_recipe
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
        recipe: What to train; ``steps`` is what fits into ``minutes`` where these are given.
        folder: Of weights.
        work: Of checkpoints.
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
    begun = earlier_recipe(work, recipe.seed)
    if begun is not None and minutes is not None:
        recipe, minutes = begun, None  # its number of steps was chosen when it began
    training = ContrastiveTraining(recipe, device, work, say=say)
    contact_sheet(training.images[_spread(recipe)], Path(folder) / f"{name}.png")
    if minutes is not None:
        training.fill(60 * minutes)
    if not training.run(within):
        say(f"{name}: stopped at step {training.step} of {training.recipe.steps}; the same command goes on")
        return None
    graphics = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return save_extractor(
        folder, name, training.result(), training.recipe, seconds=round(training.seconds, 1), device=graphics,
        loss=round(training.losses[-1][1], 4), torch=torch.__version__,
    )  # fmt: skip


def _spread(recipe: Recipe) -> torch.Tensor:
    """Numbers of 128 pictures, of both kinds: evenly over the first chunk."""
    first = min(recipe.images, recipe.processes.chunk)
    return torch.linspace(0, first - 1, min(128, first)).long()
