"""Deliberate privacy bugs, as patches: what a careless change to the library could do.

Each takes a ``pytest.MonkeyPatch`` and breaks the real code for the time of one test. None is a switch in the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weightclip.bounds._conv as conv_rules
import weightclip.bounds._dense as dense_rules
import weightclip.bounds._normalise as norm_rules
import weightclip.certificate._plan as certificate
import weightclip.engine._step as loop
import weightclip.factors._dense as dense_factors
import weightclip.sampling._loader as sampling
from weightclip.noise._mechanisms import Allocation, floored
from weightclip.noise._release import Release
from weightclip.noise._streams import Streams

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
    original = certificate.Plan.backward

    def shifted(self: Any, gain: Any) -> Any:
        bound = original(self, gain)
        return [b * g[0] if node.layer is not None else b
                for b, g, node in zip(bound, gain, self.graph.nodes, strict=True)]  # fmt: skip

    patch.setattr(certificate.Plan, "backward", shifted)


@mutant("the bias's 1 left out of the input norm", "printed algorithm", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dense_rules, "pythagoras", lambda module, weight_part, bias_part: weight_part)


@mutant("division by the realised batch size", "printed algorithm", ALIGNED)
def _(patch: pytest.MonkeyPatch) -> None:
    original = loop.Training.before_step

    def before(self: Any, *args: Any) -> None:
        if self.info is not None:
            self.release.batch = float(self.info.rows)
        original(self, *args)

    patch.setattr(loop.Training, "before_step", before)


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
