"""Audit of the image heads' trainer: the exact effect of one record on its sums, at weights far from the start.

The heads have a forward and backward of their own (int8 features, one hidden layer), so that the audits of the engine
say nothing about them. Records here are random features of norm one; every label is tried.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from weightclip.audit import Check
from weightclip_studies.images._check import largest_shares
from weightclip_studies.images._heads import HeadTrainer
from weightclip_studies.images._product import collect, encode
from weightclip_studies.images._settings import HeadSettings

HEADS = "image heads, one record"
_TOLERANCE = 1e-9


def head_trainers() -> dict[str, HeadTrainer]:
    """A small trainer for each way of bounding a head, by name."""
    ways = {
        "linear": HeadSettings(hidden=0, loss_cap=0.3),
        "weights": HeadSettings(hidden=6, loss_cap=0.3, weight_norm=2.0),
        "factors": HeadSettings(hidden=6, loss_cap=0.3, cotangent_radius=0.1, layer_radius=1.0),
        "layer caps": HeadSettings(hidden=6, layer_caps=(0.1, 0.3), allocation="least-variance"),
        "joint cap": HeadSettings(hidden=6, joint_cap=(0.2, 0.2)),
    }
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 20, generator=generator)
    data = collect(encode(x / x.norm(dim=1, keepdim=True)), torch.randint(0, 10, (64,), generator=generator))
    made = {}
    for name, settings in ways.items():
        trainer = HeadTrainer(data, replace(settings, batch=40, steps=4), 1.0, 0)
        trainer.flat.copy_(30 * torch.randn(trainer.flat.shape, generator=torch.Generator().manual_seed(3)))
        trainer._clip()
        made[name] = trainer
    return made


def head_check(name: str, trainer: HeadTrainer, records: int = 12) -> Check:
    """The largest share of what the noise is scaled to that one record was found to have, alone and in a sum.

    Formal guarantees:
        None: an audit can only refute. Above 1 the trainer leaks.
    """
    shares = largest_shares(trainer, records)
    worst = max(shares.values())
    return Check(HEADS, name, worst, 1.0, not worst <= 1 + _TOLERANCE, f"largest share {worst:.6f}", dict(shares))
