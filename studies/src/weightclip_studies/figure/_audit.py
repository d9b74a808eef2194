"""Falsifier and one-step audit of every network and method of the figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from weightclip_studies.figure._recipe import BY_OPACUS, Recipe, bounds_for, build
from weightclip_studies.figure._rows import ROWS_FILE, Row, read_rows
from weightclip_studies.images._settings import ALLOCATIONS

_NARROW = {"wrn-16-4": "wrn-10-1", "wrn-40-4": "wrn-10-1"}
_SIZES = {"convnet": 28}  # networks that are audited as they were trained


def audit_recipe(recipe: Recipe, restarts: int = 2, steps: int = 10, size: int = 8) -> dict[str, float]:
    """Largest found gradient over its bound, and largest shift of one release by one record in units of the noise.

    The engine, with the bounds, loss and allocation of `_train`, trains the ConvNet itself on pictures of ``size`` (of
    the Wide-ResNets a narrow relative on 8 x 8), in float32 and step by step, not as a graph. Above 1 the recipe leaks.
    """
    from weightclip.audit import Subject, falsify, hostile_neighbours, step_law

    small = replace(recipe, network=_NARROW.get(recipe.network, recipe.network))
    planes = 1 if recipe.network == "convnet" else 3

    def model() -> nn.Module:
        return build(small, planes, size, 0)

    def records(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(n, planes, size, size, generator=generator), torch.randint(0, 10, (n,), generator=generator)

    bounds = bounds_for(small, model(), records(32, torch.Generator().manual_seed(7))[0])
    subject = Subject(recipe.network, model, recipe.loss(), bounds, records,
                      allocation=ALLOCATIONS["adam-aware" if recipe.adam else "equal"])  # fmt: skip
    found = falsify(subject, restarts=restarts, steps=steps)
    law = step_law(subject, hostile_neighbours(subject, found.loudest))
    return {"falsifier": max([found.joint, *(layer.ratio for layer in found.layers)]), "one_step": law.worst.shift}


def audit(out: Path) -> list[Row]:
    """`audit_recipe` of every kind of run that the engine made; written to ``audit.json``."""
    done: dict[str, Row] = {}
    for row in read_rows(out / ROWS_FILE):
        recipe = Recipe(**row["recipe"])
        if recipe.method in (*BY_OPACUS, "plain"):
            continue
        kind = {k: getattr(recipe, k) for k in ("network", "method", "adam", "group_norm", "standardise")}
        if str(kind) not in done:
            size = _SIZES.get(recipe.network, 8)
            done[str(kind)] = kind | {"size": size} | audit_recipe(recipe, size=size)
            (out / "audit.json").write_text(json.dumps(list(done.values()), indent=1) + "\n")
    return list(done.values())
