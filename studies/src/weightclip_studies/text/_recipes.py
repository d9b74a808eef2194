"""Recipes that may help under noise, each against the same run without it, on the dev part."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weightclip_studies.images._noise import DELTA
from weightclip_studies.text._jobs import write
from weightclip_studies.text._networks import Lora, Part, PlainLora, Thawed
from weightclip_studies.text._settings import Recipe, Settings
from weightclip_studies.text._study import CLIPS, Line, Study, Told, Trial

COLUMNS = ("recipe", "part", "method", "epsilon", "delta", "seeds", "rate", "dev", "sem", "above_plain", "steps",
           "batch", "device")  # fmt: skip
_SEEDS = (1000, 1001)
_RATES = {"head": (0.3, 1.0), "lora": (1e-2,)}
_METHOD = "cap"


@dataclass(frozen=True)
class Tried:
    """One recipe.

    Attributes:
        part: What is trained; None for that of the study.
        batch: Batches in units of the study's.
        epochs: Passes in units of the study's.
        averaging: Decay of the average that is evaluated.
        recipe: What is done with releases.
        slower: What learning rates are divided by: some recipes make steps longer.
    """

    part: Part | None = None
    batch: int = 1
    epochs: int = 1
    averaging: float = 0.95
    recipe: Recipe = field(default_factory=Recipe)
    slower: float = 1.0


RECIPES: Mapping[str, Tried] = {
    "plain": Tried(),
    "rank 8 on queries and values": Tried(part=Lora(8, ("query", "value"))),  # weightclip train --finetune lora
    "batches twice as large": Tried(batch=2),
    "batches four times as large, twice the passes": Tried(batch=4, epochs=2),
    "AdamW without the noise's variance": Tried(recipe=Recipe(corrected=True), slower=5.0),
    "releases through a low-pass filter": Tried(recipe=Recipe(lowpass=0.9)),
    "head started from class means": Tried(recipe=Recipe(warm=50.0)),
    "both factors of the updates trained": Tried(part=PlainLora()),
    "normalisations trained too": Tried(part=Thawed(Lora(), norms=True)),
    "embeddings trained too": Tried(part=Thawed(Lora(), embeddings=True)),
    "no averaging of weights": Tried(averaging=0.0),
    "longer averaging of weights": Tried(averaging=0.98),
    "rate that does not fall": Tried(recipe=Recipe(final=1.0)),
    "rate that falls to nothing": Tried(recipe=Recipe(final=0.0)),
}
"""In order of interest. "Plain" has what the study has: updates with a fixed orthonormal factor, frozen normalisations
and embeddings, an average of weights, a rate that falls to a tenth."""


def recipes_of(part: Part) -> tuple[str, ...]:
    """Names of the recipes that can be tried on a part: on a head those that change no other layers."""
    return tuple(name for name, tried in RECIPES.items() if tried.part is None or isinstance(part, Lora))


def trials(study: Study, name: str, epsilon: float, part: Part) -> list[list[Trial]]:
    """Runs of a recipe: as many for each, a list for every learning rate."""
    tried = RECIPES[name]
    passes = study.epochs if part.name == "head" else max(1, study.epochs // 2)
    settings = Settings(
        _METHOD, 1.0, CLIPS[_METHOD], study.batch * tried.batch, passes * tried.epochs, tried.averaging,
        tried.recipe,
    )  # fmt: skip
    rated = [replace(settings, rate=rate / tried.slower) for rate in _RATES[part.name]]
    return [[Trial(tried.part or part, one, epsilon, seed, "dev") for seed in _SEEDS] for one in rated]


def recipe_row(study: Study, name: str, epsilon: float, part: Part, told: Told) -> Line | None:
    """A row of the recipes' table; None where runs are missing and there is no time left to make them.

    Dev accuracies chose the rate, for every recipe from as many: they compare recipes, and promise nothing of other
    sentences.
    """
    best: tuple[float, list[float], Trial, Any] | None = None
    for group in trials(study, name, epsilon, part):
        found = study.ask(group)
        scores = [entry["accuracy"] for entry in found if entry is not None]
        if len(scores) < len(group):
            return None
        if best is None or statistics.mean(scores) > best[0]:
            best = statistics.mean(scores), scores, group[0], found[0]
    assert best is not None
    mean, scores, trial, entry = best
    told(f"{name}, epsilon {epsilon:g}: {mean:.4f} on dev at rate {trial.settings.rate:g}")
    return {
        "recipe": name, "part": trial.part.name, "method": _METHOD, "epsilon": f"{epsilon:g}", "delta": f"{DELTA:g}",
        "seeds": len(scores), "rate": f"{trial.settings.rate:g}", "dev": f"{mean:.4f}",
        "sem": f"{statistics.stdev(scores) / len(scores) ** 0.5:.4f}" if scores[1:] else "", "above_plain": "",
        "steps": trial.settings.steps(study.size), "batch": trial.settings.batch, "device": entry["device"],
    }  # fmt: skip


def write_recipes(path: Path, rows: list[Line]) -> None:
    """Add rows to the file, each with its distance to the plain run of its part, ε and device."""
    write(path, rows, COLUMNS, ("recipe", "part", "epsilon", "device"), _compared)


def _compared(rows: list[Line]) -> list[Line]:
    plain = {(r["part"], r["epsilon"], r["device"]): float(r["dev"]) for r in rows if r["recipe"] == "plain"}
    result = []
    for row in rows:
        base = plain.get((row["part"], row["epsilon"], row["device"]))
        result.append({**row, "above_plain": "" if base is None else f"{float(row['dev']) - base:+.4f}"})
    order = list(RECIPES)
    return sorted(result, key=lambda r: (r["part"], float(r["epsilon"]), r["device"], order.index(r["recipe"])))
