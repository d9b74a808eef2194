"""More deliberate privacy bugs: in noise, release, bounds, sampling, loss and ledger."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.mutants.audit_mutants import (
    ALIGNED,
    CLIPPED,
    FLOAT32,
    JOINT,
    LARGE,
    PIECES,
    POOL,
    RADII,
    SHARED,
    Patch,
    _around_release,
    _with_sigma,
    mutant,
)

import weightclip.certificate._gains as gains
import weightclip.certificate._plan as certificate
import weightclip.engine._checkpoint as checkpoint
import weightclip.engine._engine as engine
import weightclip.engine._entrance as projection
import weightclip.engine._install as install
import weightclip.engine._step as loop
import weightclip.losses as losses
import weightclip.sampling._loader as sampling
from weightclip.factors import Collector
from weightclip.noise._release import Release
from weightclip.noise._streams import Streams


@mutant("noise for the mean added to the sum", "noise", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    _around_release(patch, lambda release, step: _with_sigma(release, 1 / release.batch))


def _by_pieces(patch: pytest.MonkeyPatch, noises: Callable[[int], int]) -> None:
    original = loop.Training.before_step

    def before(self: Any, *args: Any) -> None:
        undo = _with_sigma(self.release, math.sqrt(noises(self.info.piece + 1)))
        try:
            original(self, *args)
        finally:
            undo()

    patch.setattr(loop.Training, "before_step", before)


@mutant("noise once per physical batch", "noise", PIECES)
def _(patch: pytest.MonkeyPatch) -> None:
    _by_pieces(patch, lambda pieces: pieces)


@mutant("noise once too few", "noise", PIECES)
def _(patch: pytest.MonkeyPatch) -> None:
    _by_pieces(patch, lambda pieces: pieces - 1)


@mutant("the same noise in every step", "noise", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Streams.normal_
    patch.setattr(Streams, "normal_", lambda self, out, label, *ints: original(Streams.seeded(0), out, label, 0))


@mutant("the same noise in every layer", "noise", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Streams.normal_

    def repeat(self: Streams, out: torch.Tensor, label: str, *ints: int) -> torch.Tensor:
        original(self, out, label, *ints)
        return out.copy_(out[:8].repeat(-(-out.numel() // 8))[: out.numel()])

    patch.setattr(Streams, "normal_", repeat)


@mutant("bfloat16 noise", "noise", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Streams.normal_
    patch.setattr(Streams, "normal_", lambda self, out, *a: out.copy_(original(self, out, *a).bfloat16()))


@mutant("noise on biases forgets their scale", "noise", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    def before(release: Release, step: int) -> Callable[[], None]:
        blocks, release.blocks = release.blocks, [replace(b, beta=1.0) for b in release.blocks]

        def undo() -> None:
            release.blocks = blocks

        return undo

    _around_release(patch, before)


@mutant("moving average of raw gradients released", "release", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    def before(release: Release, step: int) -> None:
        past = release.__dict__.setdefault("past", [None] * len(release.sums))
        for i, (total, old) in enumerate(zip(release.sums, past, strict=True)):
            if total is not None and old is not None:
                release.sums[i] = total + 0.9 * old
            elif old is not None:
                release.sums[i] = 0.9 * old
        release.__dict__["past"] = list(release.sums)

    _around_release(patch, before)


@mutant("bfloat16 sums", "release", LARGE)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Release.add
    patch.setattr(Release, "add", lambda self, i, g: original(self, i, g.bfloat16().to(g.dtype)))


@mutant("no slack for rounding", "release", FLOAT32)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(install, "sum_slack", lambda plan, *rest: [1.0] * len(plan.layers))


def _not_enforced(limit: str) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        original = install.make_layer_private
        patch.setattr(install, "make_layer_private", lambda module, **kw: original(module, **{**kw, limit: None}))

    return apply


mutant("cotangent radius in the noise, not in the code", "bounds", RADII)(_not_enforced("cotangent"))
mutant("input radius of a layer in the noise, not in the code", "bounds", RADII)(_not_enforced("radius"))


def _unlimited(patch: pytest.MonkeyPatch) -> None:
    """Without the limit at the product a release is as true as its certificate, and no more."""
    patch.setattr(Collector, "_scale", lambda self, *args: None)


@mutant("joint cap in the noise, not in the code", "bounds", JOINT)
def _(patch: pytest.MonkeyPatch) -> None:
    original = install.Entry.of
    patch.setattr(
        install.Entry, "of", lambda layer, places, uses, joint, measure, tied: original(layer, places, uses, tied=tied)
    )
    _unlimited(patch)


@mutant("input projection in the noise, not in the code", "bounds", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = projection.project_records
    patch.setattr(projection, "project_records", lambda x, radius, *rest: original(x, math.inf, *rest))
    _unlimited(patch)


@mutant("a record that is not finite reaches the sum", "bounds", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    def naive(x: torch.Tensor, radius: float, *rest: Any) -> torch.Tensor:
        norm = x.flatten(1).norm(dim=1).view(-1, *(1,) * (x.dim() - 1))
        return x if math.isinf(radius) else x * (radius / norm.clamp(min=radius))

    patch.setattr(projection, "project_records", naive)
    _unlimited(patch)


@mutant("users counted instead of edges", "bounds", SHARED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = certificate.Plan.backward

    def users(self: Any, gain: Any) -> Any:
        kept = [tuple(0.0 if e in node.edges[:i] else g for i, (e, g) in enumerate(zip(node.edges, gs, strict=True)))
                for node, gs in zip(self.graph.nodes, gain, strict=True)]  # fmt: skip
        return original(self, kept)

    patch.setattr(certificate.Plan, "backward", users)


@mutant("several uses of a layer counted once", "bounds", SHARED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = certificate.Plan._layer
    patch.setattr(certificate.Plan, "_layer", lambda self, path, uses, *rest: original(self, path, uses[:1], *rest))


@mutant("weights clipped before the step instead of after", "bounds", CLIPPED)
def _(patch: pytest.MonkeyPatch) -> None:
    # the printed algorithm trusts C: the norm that is accounted is the limit, whatever the weights are
    real = gains.Gains.current

    def current(self: Any, *rest: Any) -> Any:
        limit = self.plan.bounds.weight_norm
        if limit is None:  # the canaries' model has no limit to trust
            return real(self, *rest)
        return {path: torch.tensor(limit, dtype=torch.float64) for path in self.plan.layers}

    original = loop.Training.before_step

    def before(self: Any, *args: Any) -> None:
        original(self, *args)
        self.clip()  # then the optimiser moves the weights out of the ball again

    def after(self: Any, *_: Any) -> None:
        if not self._skip:
            self.gate.clear()

    _unlimited(patch)
    patch.setattr(gains.Gains, "current", current)
    patch.setattr(loop.Training, "before_step", before)
    patch.setattr(loop.Training, "after_step", after)


@mutant("shuffled batches accounted as Poisson draws", "sampling", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    def shuffled(self: Any, draw: int) -> np.ndarray:
        if self.sample_rate == 1:
            return np.arange(self._n)
        width = self._draws_per_pass
        order = self.streams.numpy("shuffle", draw // width).permutation(np.arange(max(self._n, width)))
        return np.sort(np.array([i for i in np.array_split(order, width)[draw % width] if i < self._n], dtype=np.int64))

    patch.setattr(sampling.PoissonLoader, "indices", shuffled)


@mutant("large draws are truncated", "sampling", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    original = sampling.PoissonLoader.indices

    def cut(self: Any, draw: int) -> np.ndarray:
        found = original(self, draw)
        return found if self.sample_rate == 1 else found[-1:]

    patch.setattr(sampling.PoissonLoader, "indices", cut)


@mutant("padding counts as a record", "sampling", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = loop.Training.admit
    patch.setattr(loop.Training, "admit", lambda self, logits: (original(self, logits)[0], None))


@mutant("loss averaged over the realised batch", "loss", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = losses.CrossEntropy.gradient
    patch.setattr(losses.CrossEntropy, "gradient", lambda self, z, y: original(self, z, y) * (8 / len(z)))


@mutant("a resumed run has a fresh ledger", "ledger", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    original = checkpoint.load

    def load(run: Any, path: Any, *, exact: bool) -> None:
        original(run, path, exact=exact)
        run.steps = 0

    patch.setattr(checkpoint, "load", load)


@mutant("a resumed run repeats its noise", "ledger", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Streams, "advance", lambda self, nonce: self)


@mutant("the ledger states more noise than is added", "ledger", POOL)
def _(patch: pytest.MonkeyPatch) -> None:
    original = engine.PrivacyEngine.mechanisms

    def generous(self: Any) -> list[Any]:
        return [replace(m, sigma=1.1 * m.sigma) for m in original(self)]

    patch.setattr(engine.PrivacyEngine, "mechanisms", generous)
