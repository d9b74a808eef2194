"""The same heads through the real engine: its bounds, its loss, its audits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weightclip.bounds import Rescale, Sphere
from weightclip.certificate import Bounds
from weightclip.losses import CrossEntropy
from weightclip.models import MLP
from weightclip_studies.images._settings import ALLOCATIONS, HeadSettings


def head_model(width: int, settings: HeadSettings, classes: int = 10) -> MLP:
    """The head as a module: dense layers ``layers.0`` and ``layers.2``, or ``layers.0`` alone."""
    return MLP(width, (settings.hidden,) if settings.hidden else (), classes)


def head_loss(settings: HeadSettings) -> CrossEntropy:
    """tau CE(z/tau) with its gradient capped at B."""
    return CrossEntropy(temperature=settings.temperature, scale_by_temperature=True, cap=settings.loss_cap)


def head_bounds(settings: HeadSettings) -> Bounds:
    """What the engine must enforce to train this head as `HeadTrainer` does (which stores features inside the ball)."""
    s = settings
    names: tuple[str, ...] = ("layers.0", "layers.2")[: s.layers]
    caps = None if s.layer_caps is None else dict[str, float](zip(names, s.layer_caps, strict=True))
    joint = None if s.joint_cap is None else dict[str, float](zip(names, s.joint_cap, strict=True))
    factors = bool(s.hidden) and caps is None and joint is None
    return Bounds(
        input_radius=1.0,
        weight_norm=s.weight_norm,
        clip=Sphere() if s.sphere else Rescale(),
        cotangent_radius={"layers.0": s.cotangent_radius} if factors and s.cotangent_radius is not None else None,
        layer_radius={"layers.2": s.layer_radius} if factors and s.layer_radius is not None else None,
        layer_cap=caps,
        joint_cap=joint,
        bias_scale=s.bias_scale,
    )


def audit_head(settings: HeadSettings, width: int = 24, hidden: int = 8) -> dict[str, float]:
    """Falsifier and one-step audit of the real engine under these settings, on a narrow head.

    Returns:
        ``falsifier``: largest found gradient over its bound, over layers and jointly; ``one_step``: largest found shift
        of a release by one record, in units of what the noise is scaled to. Above 1 the setting leaks.
    """
    from weightclip.audit import Subject, falsify, hostile_neighbours, step_law

    small = replace(settings, hidden=hidden if settings.hidden else 0)

    def model() -> MLP:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return head_model(width, small)

    def records(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, width, generator=generator)
        return x / x.norm(dim=1, keepdim=True), torch.randint(0, 10, (n,), generator=generator)

    subject = Subject(
        "head", model, head_loss(small), head_bounds(small), records, allocation=ALLOCATIONS[settings.allocation]
    )
    found = falsify(subject, restarts=8, steps=30)
    law = step_law(subject, hostile_neighbours(subject, found.loudest))
    return {
        "falsifier": max([found.joint, *(layer.ratio for layer in found.layers)]),
        "one_step": law.worst.shift,
    }


def audit_results(folder: Path) -> list[dict[str, Any]]:
    """`audit_head` of every private head of the results in ``folder``; written to audit.json there.

    A head that was audited as it is now keeps its row; rows of convolutional networks (`_audit`) stay.
    """
    path = Path(folder) / "audit.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    networks = [r for r in kept if "bound" in r]
    rows: list[dict[str, Any]] = []
    for results in sorted(Path(folder).glob("*.json")):
        entries = json.loads(results.read_text())
        if not isinstance(entries, list) or results.name == "audit.json":
            continue
        for entry in entries:
            if entry.get("shares") is None:  # not private, or a convolutional network
                continue
            cell = {k: entry[k] for k in ("dataset", "model", "method", "epsilon")}
            told = cell | {f"trained_{k}": v for k, v in entry["shares"].items()}  # of this very head
            known = next((r for r in kept if told.items() <= r.items()), None)
            rows.append(known or cell | audit_head(HeadSettings.from_dict(entry["settings"])) | told)
            path.write_text(json.dumps(rows + networks, indent=1) + "\n")
    return rows
