"""Falsifier and one-step audit of the convolutional networks under the bounds they were trained with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.losses import CrossEntropy
from weightclip.models import ScatteringHead, SmallCNN, WideResNet
from weightclip_studies.images._settings import ALLOCATIONS
from weightclip_studies.images._training import ConvSettings, bounds_for

# Narrow relatives of the networks: the same kinds of layers in the same order, and the shape of a record.
_NARROW: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small-cnn": (SmallCNN.for_mnist, (1, 28, 28)),
    "scattering+cnn": (
        lambda: ScatteringHead("cnn", 6, 8, (4, 4), groups=None, activation=nn.Tanh).body, (6, 8, 8)),
    "wrn-16-4": (lambda: WideResNet(10, 1, groups=4), (3, 8, 8)),
}  # fmt: skip


def audit_network(settings: ConvSettings, restarts: int = 4, steps: int = 20) -> dict[str, float]:
    """Largest found gradient over its bound, and largest shift of one release by one record in units of the noise.

    The real engine trains a narrow relative of the network; limits stay where they start (what private quantiles
    release is audited by ``weightclip audit``). Above 1 the setting leaks.
    """
    from weightclip.audit import Subject, falsify, hostile_neighbours, step_law

    make, shape = _NARROW[settings.network]

    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    def records(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(n, *shape, generator=generator), torch.randint(0, 10, (n,), generator=generator)

    public = records(32, torch.Generator().manual_seed(7))[0]
    bounds = replace(bounds_for(settings, model(), public), adaptive=None)
    subject = Subject(settings.network, model, CrossEntropy(cap=settings.loss_cap), bounds, records,
                      allocation=ALLOCATIONS[settings.allocation])  # fmt: skip
    found = falsify(subject, restarts=restarts, steps=steps)
    law = step_law(subject, hostile_neighbours(subject, found.loudest))
    return {"falsifier": max([found.joint, *(layer.ratio for layer in found.layers)]), "one_step": law.worst.shift}


def audit_networks(folder: Path) -> list[dict[str, Any]]:
    """`audit_network` of every network and bound in convolutions.json that the engine trained; added to audit.json."""
    folder = Path(folder)
    path = folder / "audit.json"
    rows = [r for r in json.loads(path.read_text()) if "bound" not in r] if path.exists() else []
    done: dict[tuple[str, ...], dict[str, float]] = {}
    for entry in json.loads((folder / "convolutions.json").read_text()):
        if entry["bound"] in ("opacus", "plain"):
            continue
        settings = ConvSettings(**entry["settings"])
        kind = (settings.network, settings.bound, settings.allocation)
        if kind not in done:
            done[kind] = audit_network(settings)
        cell = {k: entry[k] for k in ("dataset", "model", "method", "bound", "epsilon")}
        rows.append(cell | done[kind])
        path.write_text(json.dumps(rows, indent=1) + "\n")
    return rows
