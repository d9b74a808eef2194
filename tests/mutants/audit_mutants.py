"""Deliberate privacy bugs, as patches: what a careless change to the library could do.

Each takes a ``pytest.MonkeyPatch`` and breaks the real code for the time of one test. None is a switch in the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weightclip._checkpoint as checkpoint
import weightclip._criterion as criterion
import weightclip._gains as gains
import weightclip._gate as gate
import weightclip._loop as loop
import weightclip.bounds._conv as conv_rules
import weightclip.bounds._dense as dense_rules
import weightclip.bounds._normalise as norm_rules
import weightclip.certificate as certificate
import weightclip.engine as engine
import weightclip.factors._dense as dense_factors
import weightclip.losses as losses
import weightclip.sampling as sampling
from weightclip._release import Release
from weightclip._streams import Streams
from weightclip.mechanisms import Allocation, floored

Patch = Callable[[pytest.MonkeyPatch], None]
ALIGNED, CLIPPED, RADII, JOINT, PIECES, CONV, POOL, NORM, SHARED, FLOAT32, LARGE = (
    "aligned dense net", "clipped weights", "radii on both factors", "joint cap", "layer caps, small pieces",
    "convolutions", "overlapping pooling", "normalisation", "shared layer and residual", "float32 sums",
    "large batches",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A bug: its name, where it comes from, how to make it, and a trainer on which it matters."""

    name: str
    origin: str
    patch: Patch
    subject: str


MUTANTS: list[Mutant] = []


def mutant(name: str, origin: str, subject: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MUTANTS.append(Mutant(name, origin, patch, subject))
        return patch

    return register


def _around_release(patch: pytest.MonkeyPatch, before: Callable[[Release, int], Callable[[], None] | None]) -> None:
    """Run ``before(release, step)`` ahead of each release, and what it returns afterwards.

    Factors of the noise that were computed beforehand are dropped: a mutant may change what they depend on.
    """
    original = Release.release

    def release(self: Release, sensitivities: torch.Tensor, streams: Streams, step: int, factors: Any = None) -> None:
        after = before(self, step)
        original(self, sensitivities, streams, step)
        if after is not None:
            after()

    patch.setattr(Release, "release", release)


def _with_sigma(release: Release, factor: float) -> Callable[[], None]:
    sigma, release.sigma = release.sigma, release.sigma * factor

    def undo() -> None:
        release.sigma = sigma

    return undo


# -- rows of SOUNDNESS section 2 -----------------------------------------------------------------------------------


@mutant("inputs scaled by the batch's largest norm", "printed algorithm", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    original = dense_factors.record_scale

    def shared(x_norm: Any, d_norm: Any, *rest: Any) -> Any:
        return original(None if x_norm is None else x_norm.amax().expand_as(x_norm), d_norm, *rest)

    patch.setattr(dense_factors, "record_scale", shared)


@mutant("K layers released, accounted as one", "printed algorithm", POOL)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Allocation, "scales", lambda self, delta, dims, sigma: sigma * floored(delta))


@mutant("product of norms starts at layer k itself", "printed algorithm", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = certificate.Plan._backward

    def shifted(self: Any, gain: Any) -> Any:
        bound = original(self, gain)
        return [b * g[0] if node.layer is not None else b
                for b, g, node in zip(bound, gain, self.graph.nodes, strict=True)]  # fmt: skip

    patch.setattr(certificate.Plan, "_backward", shifted)


@mutant("the bias's 1 left out of the input norm", "printed algorithm", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dense_rules, "pythagoras", lambda module, weight_part, bias_part: weight_part)


@mutant("division by the realised batch size", "printed algorithm", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = loop.TrainingLoop._before_step

    def before(self: Any, *args: Any) -> None:
        if self._info is not None:
            self._release.batch = float(self._info.rows)
        original(self, *args)

    patch.setattr(loop.TrainingLoop, "_before_step", before)


@mutant("empty draws are drawn again", "printed algorithm", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = sampling.PoissonLoader.indices

    def again(self: Any, draw: int) -> np.ndarray:
        for attempt in range(1000):
            found = original(self, draw + attempt * 1_000_003)
            if found.size:
                return found
        return found

    patch.setattr(sampling.PoissonLoader, "indices", again)


@mutant("convolutions without the kernel's overlap", "printed algorithm", CONV)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(conv_rules, "overlap", lambda *sizes: 1)
    patch.setattr(conv_rules, "layer_norm_tensor", lambda module, p, *rest, **kw: _matrix_norm(module.weight))


def _matrix_norm(weight: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(weight.detach().double().flatten(1), 2)


@mutant("power iteration for the norm of a matrix", "printed algorithm", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    def iterate(module: nn.Module, p: float, *rest: Any, **kw: Any) -> torch.Tensor:
        matrix = module.weight.detach().double().flatten(1)  # type: ignore[union-attr,operator]
        v = torch.randn(matrix.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        for _ in range(5):
            v = torch.nn.functional.normalize(matrix.T @ (matrix @ v), dim=0)
        return (matrix @ v).norm()

    patch.setattr(dense_rules, "layer_norm_tensor", iterate)


def _unit_gains(patch: pytest.MonkeyPatch) -> None:
    original = certificate.Plan.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        one = {i: tuple(replace(effect, gains=(1.0,) * len(effect.gains)) for effect in pair)
               for i, pair in self._static.items()}  # fmt: skip
        self._static = one

    patch.setattr(certificate.Plan, "__init__", init)
    patch.setattr(norm_rules.NormRule, "floor", lambda self, module: 1.0)


for _name, _subject in (("GELU", ALIGNED), ("overlapping pooling", POOL), ("normalisation", NORM)):
    mutant(f"layers without parameters have gain 1: {_name}", "printed algorithm", _subject)(_unit_gains)


@mutant("best of twenty runs at the price of one", "printed algorithm", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Streams.normal_

    def before(release: Release, step: int) -> Callable[[], None]:
        target = torch.cat([torch.zeros(n) if v is None else v.flatten()
                            for v, n in zip(release.sums, release.sizes, strict=True)])  # fmt: skip

        def best(self: Streams, out: torch.Tensor, label: str, *ints: int) -> torch.Tensor:
            options = [original(self, torch.empty_like(out), f"{label}/{i}", *ints) for i in range(20)]
            return out.copy_(max(options, key=lambda o: float(o @ target.to(o.dtype))))

        Streams.normal_ = best  # type: ignore[method-assign]

        def undo() -> None:
            Streams.normal_ = original  # type: ignore[method-assign]

        return undo

    _around_release(patch, before)


# -- the list ------------------------------------------------------------------------------------------------


@mutant("noise for the mean added to the sum", "noise", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    _around_release(patch, lambda release, step: _with_sigma(release, 1 / release.batch))


def _by_pieces(patch: pytest.MonkeyPatch, noises: Callable[[int], int]) -> None:
    original = loop.TrainingLoop._before_step

    def before(self: Any, *args: Any) -> None:
        undo = _with_sigma(self._release, math.sqrt(noises(self._info.piece + 1)))
        try:
            original(self, *args)
        finally:
            undo()

    patch.setattr(loop.TrainingLoop, "_before_step", before)


@mutant("noise once per physical batch", "noise", PIECES)
def _(patch: pytest.MonkeyPatch) -> None:
    _by_pieces(patch, lambda pieces: pieces)


@mutant("noise once too few", "noise", PIECES)
def _(patch: pytest.MonkeyPatch) -> None:
    _by_pieces(patch, lambda pieces: pieces - 1)


@mutant("the same noise in every step", "noise", RADII)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Streams.normal_
    patch.setattr(Streams, "normal_", lambda self, out, label, *ints: original(self, out, label, 0))


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
    patch.setattr(engine, "sum_slack", lambda plan, *rest: [1.0] * len(plan.layers))


def _not_enforced(limit: str) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        original = engine.make_layer_private
        patch.setattr(engine, "make_layer_private", lambda module, **kw: original(module, **{**kw, limit: None}))

    return apply


mutant("cotangent radius in the noise, not in the code", "bounds", RADII)(_not_enforced("cotangent"))
mutant("input radius of a layer in the noise, not in the code", "bounds", RADII)(_not_enforced("radius"))
mutant("joint cap in the noise, not in the code", "bounds", JOINT)(_not_enforced("joint"))


@mutant("input projection in the noise, not in the code", "bounds", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = gate.project_records
    patch.setattr(gate, "project_records", lambda x, radius, *rest: original(x, math.inf, *rest))


@mutant("a record that is not finite reaches the sum", "bounds", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    def naive(x: torch.Tensor, radius: float, *rest: Any) -> torch.Tensor:
        norm = x.flatten(1).norm(dim=1).view(-1, *(1,) * (x.dim() - 1))
        return x if math.isinf(radius) else x * (radius / norm.clamp(min=radius))

    patch.setattr(gate, "project_records", naive)


@mutant("users counted instead of edges", "bounds", SHARED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = certificate.Plan._backward

    def users(self: Any, gain: Any) -> Any:
        kept = [tuple(0.0 if e in node.edges[:i] else g for i, (e, g) in enumerate(zip(node.edges, gs, strict=True)))
                for node, gs in zip(self.graph.nodes, gain, strict=True)]  # fmt: skip
        return original(self, kept)

    patch.setattr(certificate.Plan, "_backward", users)


@mutant("several uses of a layer counted once", "bounds", SHARED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = certificate.Plan._layer
    patch.setattr(certificate.Plan, "_layer", lambda self, path, uses, *rest: original(self, path, uses[:1], *rest))


@mutant("weights clipped before the step instead of after", "bounds", CLIPPED)
def _(patch: pytest.MonkeyPatch) -> None:
    # the printed algorithm trusts C: the norm that is accounted is the limit, whatever the weights are
    real = gains.Gains.current

    def current(self: Any, *rest: Any) -> dict[str, torch.Tensor]:
        limit = self.plan.bounds.weight_norm
        if limit is None:  # the canaries' model has no limit to trust
            return real(self, *rest)
        return {path: torch.tensor(limit, dtype=torch.float64) for path in self.plan.layers}

    original = loop.TrainingLoop._before_step

    def before(self: Any, *args: Any) -> None:
        original(self, *args)
        self._clip()  # then the optimiser moves the weights out of the ball again

    def after(self: Any, *_: Any) -> None:
        if not self._skip:
            self._gate.clear()

    patch.setattr(gains.Gains, "current", current)
    patch.setattr(loop.TrainingLoop, "_before_step", before)
    patch.setattr(loop.TrainingLoop, "_after_step", after)


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
    original = loop.TrainingLoop._begin_loss
    patch.setattr(loop.TrainingLoop, "_begin_loss", lambda self, logits: (original(self, logits)[0], None))


@mutant("loss averaged over the realised batch", "loss", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = losses.CrossEntropy.gradient
    patch.setattr(losses.CrossEntropy, "gradient", lambda self, z, y: original(self, z, y) * (8 / len(z)))


@mutant("scaling the loss scales the sum", "loss", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = criterion._Summed.backward

    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        output, gradient, *rest = ctx.todo
        ctx.todo = (output, gradient * upstream, *rest)
        return original(ctx, upstream)

    patch.setattr(criterion._Summed, "backward", staticmethod(backward))


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
