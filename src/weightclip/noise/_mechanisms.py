"""What is added to the summed gradient: one joint Gaussian draw allocated over layers, or one K-norm draw.

Symbols as in SOUNDNESS section 1: Delta_k bounds one record's gradient of layer k, d_k counts its parameters, s_k is
the standard deviation of the noise on the summed gradient of layer k, sigma is the noise multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weightclip._device import constant
from weightclip.errors import WeightclipError

_RELATIVE_FLOOR = 1e-6
_ABSOLUTE_FLOOR = 1e-12


def floored(sensitivities: Tensor) -> Tensor:
    """Sensitivities with a floor under them, so that a layer whose bound is 0 still gets noise (SOUNDNESS 1.6).

    The floor is 1e-6 of the largest layer's (and at least 1e-12). Raising a bound keeps it a bound.
    """
    sensitivities = sensitivities.double()
    return torch.maximum(sensitivities, _RELATIVE_FLOOR * sensitivities.amax()).clamp_min(_ABSOLUTE_FLOOR)


def floored_at(sensitivities: Sequence[float]) -> float:
    """The floor of :func:`floored`, for plain numbers."""
    return max(_RELATIVE_FLOOR * max(sensitivities, default=0.0), _ABSOLUTE_FLOOR)


def _check_sizes(dims: Sequence[int], layers: int) -> None:
    if len(dims) != layers or min(dims, default=1) < 1:
        raise WeightclipError(
            f"allocation: {layers} sensitivities need as many parameter counts, all at least 1; got {list(dims)}."
        )


@dataclass(frozen=True)
class Allocation:
    """How one noise budget is divided over the layers: the s_k that minimise sum_k w_k d_k s_k^2.

    Formal guarantees:
        For every allocation, sum_k max(Delta_k, floor)^2 / s_k^2 = 1/sigma^2. If Delta_k bounds what one record adds
        to or takes from the sum of layer k, for all layers *at once*, then releasing every layer's sum with noise
        s_k N(0, I) is one Gaussian mechanism with multiplier sigma under ADD_OR_REMOVE_ONE, and is accounted as one.
        Sensitivities, sizes and sigma must be public (functions of released values alone).
    """

    def layer_weights(self, sensitivities: Tensor, d: Tensor) -> Tensor:
        """The w_k, one per layer, as float64."""
        raise NotImplementedError

    def scales(self, sensitivities: Tensor, dims: Sequence[int], sigma: float) -> Tensor:
        """The s_k as a float64 tensor on the sensitivities' device; zeros for sigma = 0.

        Tensor operations only: after the first call for a model nothing waits for the device.
        """
        if not (math.isfinite(sigma) and sigma >= 0):
            raise WeightclipError(f"allocation: the noise multiplier must be finite and at least 0, got {sigma}.")
        if sensitivities.numel() == 0:
            return torch.zeros(0, dtype=torch.float64, device=sensitivities.device)
        _check_sizes(dims, sensitivities.numel())
        numbers = self._numbers(sensitivities.tolist(), sigma) if sensitivities.is_cpu else None
        if numbers is not None:
            return torch.tensor(numbers, dtype=torch.float64)
        d = constant(tuple(float(d) for d in dims), sensitivities.device)
        return self._spread(floored(sensitivities), d, sigma)

    def _numbers(self, sensitivities: list[float], sigma: float) -> list[float] | None:
        """The s_k in plain numbers, where that is simple; None: by tensors."""
        return None

    def _spread(self, delta: Tensor, d: Tensor, sigma: float) -> Tensor:
        """s_k^2 = sigma^2 (Delta_k/sqrt(w_k d_k)) sum_j Delta_j sqrt(w_j d_j)."""
        root = torch.sqrt(self.layer_weights(delta, d) * d)  # sqrt(w_k d_k)
        return sigma * torch.sqrt(delta / root * (delta * root).sum())


@dataclass(frozen=True)
class Equal(Allocation):
    """Every layer gets the same share of the budget: s_k = sigma sqrt(K) Delta_k."""

    def _numbers(self, sensitivities: list[float], sigma: float) -> list[float] | None:
        if type(self) is not Equal or not all(map(math.isfinite, sensitivities)):
            return None
        floor, factor = floored_at(sensitivities), sigma * math.sqrt(len(sensitivities))
        return [max(value, floor) * factor for value in sensitivities]

    def _spread(self, delta: Tensor, d: Tensor, sigma: float) -> Tensor:
        if type(self) is not Equal:  # a subclass may have weights of its own
            return super()._spread(delta, d, sigma)
        return delta * (sigma * math.sqrt(delta.numel()))

    def layer_weights(self, sensitivities: Tensor, d: Tensor) -> Tensor:
        return 1.0 / (sensitivities.square() * d)


@dataclass(frozen=True)
class LeastVariance(Allocation):
    """Least total variance of the noise: w = 1."""

    def layer_weights(self, sensitivities: Tensor, d: Tensor) -> Tensor:
        return torch.ones_like(d)


@dataclass(frozen=True)
class AdamAware(Allocation):
    """Least noise relative to the gradients, which is all that Adam sees: w_k = 1/Delta_k^2."""

    def layer_weights(self, sensitivities: Tensor, d: Tensor) -> Tensor:
        return sensitivities.square().reciprocal()


@dataclass(frozen=True)
class Global(Allocation):
    """One scale for all layers, s = sigma sqrt(sum_j Delta_j^2). For comparison only: up to 43 times more variance."""

    def layer_weights(self, sensitivities: Tensor, d: Tensor) -> Tensor:
        return sensitivities.square() / d


@dataclass(frozen=True)
class Weighted(Allocation):
    """Least weighted variance, with a public positive weight w_k for each layer."""

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(float(w) for w in self.weights))
        if not all(math.isfinite(w) and w > 0 for w in self.weights):
            raise WeightclipError(f"Weighted: every weight must be finite and positive, got {self.weights}.")

    def layer_weights(self, sensitivities: Tensor, d: Tensor) -> Tensor:
        if len(self.weights) != d.numel():
            raise WeightclipError(f"Weighted: {len(self.weights)} weights for {d.numel()} layers.")
        return constant(self.weights, d.device)


def joint_multiplier(sensitivities: Tensor, scales: Tensor) -> Tensor:
    """The multiplier of the joint release, (sum_k Delta_k^2/s_k^2)^(-1/2), with floored Delta; 0 if any s_k is 0."""
    return (floored(sensitivities) / scales.double()).square().sum().rsqrt()


def combine(sigmas: Iterable[float]) -> float:
    """The multiplier of several Gaussian releases made together: (sum_i sigma_i^-2)^(-1/2); no release gives inf."""
    sigmas = [float(s) for s in sigmas]
    if any(math.isnan(s) or s < 0 for s in sigmas):
        raise WeightclipError(f"combine: noise multipliers must be at least 0, got {sigmas}.")
    if any(s == 0 for s in sigmas):
        return 0.0
    total = math.fsum(s**-2 for s in sigmas)
    return total**-0.5 if total > 0 else math.inf


def quantile_adjusted_sigma(z: float, queries: int, sigma_b: float) -> float:
    """The multiplier left for the gradients when a step also answers private quantiles (SOUNDNESS Theorem 17).

    Args:
        z: Multiplier of the whole step, the one that is accounted.
        queries: Number of quantile queries a step, Q.
        sigma_b: Standard deviation of the noise on each query's sum of indicators centred at 1/2.

    Returns:
        (z^-2 - Q (2 sigma_b)^-2)^(-1/2), to be used as sigma in an allocation.

    Formal guarantees:
        One record moves each centred sum by at most 1/2 (ADD_OR_REMOVE_ONE), so a query is a Gaussian mechanism with
        multiplier 2 sigma_b; gradients and Q queries together are one Gaussian mechanism with multiplier z.
    """
    if queries < 0 or not z >= 0 or math.isnan(sigma_b):
        raise WeightclipError(f"quantile_adjusted_sigma: z={z}, queries={queries}, sigma_b={sigma_b} out of range.")
    if queries == 0 or z == 0:
        return float(z)
    left = z**-2 - queries * (2 * sigma_b) ** -2 if sigma_b > 0 else -math.inf
    if left <= 0:
        raise WeightclipError(
            f"{queries} quantile queries with noise {sigma_b:g} cost more than the whole step's multiplier {z:g} "
            f"allows: raise sigma_b above {z * math.sqrt(queries) / 2:g}."
        )
    return left**-0.5


@dataclass(frozen=True)
class KNormMechanism:
    """The exponential (K-norm) mechanism: density proportional to exp(-epsilon0 max_k ||x_k||_p / Delta_k).

    One draw serves all layers: r ~ Gamma(sum_k d_k + 1, 1/epsilon0), noise r u_k with u_k uniform in layer k's ball
    of radius Delta_k in the entrywise l_p norm. Not competitive in high dimension; kept for comparison.

    Formal guarantees:
        epsilon0-DP jointly for all layers under ADD_OR_REMOVE_ONE, if one record's gradient of layer k has entrywise
        l_p norm at most Delta_k. Account it as a ``Mechanism`` of kind "pure", which applies the Poisson sampling.

    Attributes:
        p: Entrywise norm: 1, 2 or math.inf.
        epsilon0: Privacy parameter of one unsampled release.
    """

    p: float
    epsilon0: float

    def __post_init__(self) -> None:
        if self.p not in (1, 2, math.inf):
            raise WeightclipError(f"KNormMechanism: p must be 1, 2 or math.inf, got {self.p}.")
        if not (math.isfinite(self.epsilon0) and self.epsilon0 > 0):
            raise WeightclipError(f"KNormMechanism: epsilon0 must be finite and positive, got {self.epsilon0}.")

    def sample(self, sensitivities: Tensor, dims: Sequence[int], rng: np.random.Generator) -> list[np.ndarray]:
        """One joint draw: an array of d_k float64 numbers for each layer."""
        _check_sizes(dims, sensitivities.numel())
        radii = floored(sensitivities).tolist()
        r = rng.gamma(sum(dims) + 1, 1.0 / self.epsilon0)
        return [r * delta * self._unit_ball(d, rng) for delta, d in zip(radii, dims, strict=True)]

    def _unit_ball(self, d: int, rng: np.random.Generator) -> np.ndarray:
        # x_i with density ~ exp(-|t|^p) and E ~ Exp(1): x / (sum |x|^p + E)^(1/p) is uniform in the unit l_p ball
        # (Barthe, Guedon, Mendelson and Naor 2005, Theorem 1).
        if self.p == math.inf:
            return rng.uniform(-1.0, 1.0, d)
        if self.p == 1:
            x = rng.laplace(size=d)
            return x / (np.abs(x).sum() + rng.exponential())
        x = rng.normal(scale=math.sqrt(0.5), size=d)
        return x / math.sqrt(np.square(x).sum() + rng.exponential())

    def norm(self, blocks: Sequence[np.ndarray], sensitivities: Tensor) -> float:
        """The joint norm max_k ||x_k||_p / Delta_k; a sum that one record moves by at most 1 in it gets epsilon0."""
        radii = floored(sensitivities).tolist()
        return max(float(np.linalg.norm(x.ravel(), self.p)) / r for x, r in zip(blocks, radii, strict=True))


def round_release_(tensor: Tensor, grid: float) -> Tensor:
    """Rounds a noised release to multiples of ``grid`` in place: post-processing, free of charge.

    Before the noise it is part of the query: account for :func:`rounded_sensitivity` then.
    """
    if not (math.isfinite(grid) and grid > 0):
        raise WeightclipError(f"round_release_: the grid must be finite and positive, got {grid}.")
    return tensor.div_(grid).round_().mul_(grid)


def rounded_sensitivity(sensitivity: float, grid: float, dimension: int) -> float:
    """l2 sensitivity of a sum that is rounded to a grid *before* the noise: Delta + grid sqrt(D) (SOUNDNESS 6)."""
    return sensitivity + grid * math.sqrt(dimension)
