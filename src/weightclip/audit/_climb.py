"""The falsifier for models that torch.func cannot transform: it changes records at random and keeps what is louder.

Every record that is tried runs through the real engine, one noiseless step each, so that any model, loss and kind of
record can be searched; it needs no derivatives of gradients and finds less than :func:`weightclip.audit.falsify`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weightclip.audit._falsifier import Falsification, LayerFinding, through_engine
from weightclip.audit._subject import Records, Subject


def climb(subject: Subject, *, seed: int = 0, restarts: int = 4, steps: int = 20) -> Falsification:
    """Search for a record that moves a release by more than its noise allows, by trial alone; labels are ordinary ones.

    Args:
        subject: The trainer; it is started without noise.
        seed: Seed of the search.
        restarts: Records to begin with.
        steps: Changes tried on each; every fourth enlarges numbers instead of moving them.
    """
    generator = torch.Generator().manual_seed(seed)
    evaluate, ordinary = through_engine(subject), subject.ordinary(max(8, restarts), seed)
    engine = subject.start(subject.ordinary(2, seed), 0.0).engine
    tokens = 1 + int(ordinary[0].max())
    loudest, joint, found = (ordinary[0][:1], ordinary[1][:1]), 0.0, dict.fromkeys(engine.plan.layers, 0.0)

    def look(record: Records) -> float:
        nonlocal loudest, joint
        norms, length = evaluate(record)
        for path, norm in norms.items():
            found[path] = max(found[path], norm) if math.isfinite(norm) else math.inf
        if not length <= joint:
            joint, loudest = (length if math.isfinite(length) else math.inf), record
        return length

    for i in range(restarts):
        best = ordinary[0][i : i + 1], ordinary[1][i : i + 1]
        top = look(best)
        for t in range(steps):
            x = _changed(best[0], tokens, generator, larger=t % 4 == 3)
            y = best[1] if t % 2 else ordinary[1][torch.randint(len(ordinary[1]), (1,), generator=generator)]
            length = look((x, y))
            if not length <= top:
                best, top = (x, y), length
    usual = torch.tensor([list(evaluate((x[None], y[None]))[0].values()) for x, y in zip(*ordinary, strict=True)])
    bounds = engine.training.release.sensitivities(engine.training.sensitivity.evaluate()).tolist()
    rows = zip(found, bounds, found.values(), usual.median(0).values.tolist(), strict=True)
    return Falsification(subject.name, tuple(LayerFinding(*row) for row in rows), joint, loudest)


def _changed(x: Tensor, tokens: int, generator: torch.Generator, larger: bool) -> Tensor:
    """Some tokens replaced; or numbers moved by about their own size, or made ten times as large."""
    some = torch.rand(x.shape, generator=generator) < 0.3
    if not x.is_floating_point():
        return torch.where(some, torch.randint(0, tokens, x.shape, generator=generator, dtype=x.dtype), x)
    size = x.square().mean().sqrt().clamp(min=1e-3)
    return 10 * x if larger else torch.where(some, x + size * torch.randn(x.shape, generator=generator).to(x), x)
