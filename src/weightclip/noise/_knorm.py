"""The K-norm (exponential) mechanism in the engine: entrywise sensitivities, its draw, its calibration.

SOUNDNESS section 3, "Exponential mechanism": noise has density proportional to exp(-epsilon0 max_k ||x_k||_p/Delta_k),
Delta_k a bound of the *entrywise* l_p norm of one record's gradient of layer k. Not competitive in high dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

from weightclip._torch import ConvNd
from weightclip.accounting import Adjacency, Mechanism, epsilon
from weightclip.bounds import Numerics, Scalar, least, plus, times
from weightclip.certificate import Evaluation, Plan
from weightclip.errors import WeightclipError
from weightclip.losses import Loss
from weightclip.noise._mechanisms import KNormMechanism
from weightclip.noise._streams import NOISE, Streams

_U = 2.0**-24


@dataclass(frozen=True)
class KNorm:
    """Use the K-norm mechanism instead of the Gaussian: pure epsilon0-DP per step, epsilon0 = 1/noise_multiplier.

    Attributes:
        p: Entrywise norm that is bounded: 1 (Laplace-like noise), 2 or inf.

    Formal guarantees:
        One draw for all layers is epsilon0-DP before sampling, under adding or removing one record; it is accounted as
        a mechanism of kind "pure", amplified by Poisson sampling and composed by the accountant.
    """

    p: float = 2

    def __post_init__(self) -> None:
        if self.p not in (1, 2, math.inf):
            raise WeightclipError(f"KNorm: p must be 1, 2 or inf, got {self.p!r}.")


class Entrywise:
    """Entrywise l_p bounds of every layer's gradient, from two chains on one graph: ||delta||_1 and ||delta||_inf."""

    def __init__(self, loss: Loss, p: float) -> None:
        self.loss, self.p = loss, p
        self._chains: dict[Plan, tuple[Plan, Plan]] = {}

    def chains(self, plan: Plan) -> tuple[Plan, Plan]:
        """The plan in exponents inf and 1: a chain bounds the cotangent in the dual norm, l_1 and l_inf."""
        if plan not in self._chains:
            at = [Plan(plan.model, plan.graph, replace(plan.bounds, p=e), 0.0) for e in (math.inf, 1)]
            self._chains[plan] = (at[0], at[1])
        for chain in self._chains[plan]:
            chain.loss_bound, chain.quantiles = self.loss.bound(plan.loss_shape, chain.bounds.p), plan.quantiles
        return self._chains[plan]

    def __call__(self, plan: Plan, evaluations: Mapping[str, Evaluation], numerics: Numerics) -> dict[str, Evaluation]:
        """The evaluations with entrywise sensitivities in place of l2 ones.

        Formal guarantees:
            For every record the entrywise l_p norm of its gradient of layer k (bias times beta) is at most the
            returned sensitivity: from ||delta|| and ||x|| where the layer's kind has a rule, and from the l2 bound
            always (||g||_1 <= sqrt(d) ||g||_2, ||g||_inf <= ||g||_2).
        """
        if self.p == 2:
            return dict(evaluations)
        first, second = self.chains(plan)
        gains, outputs = first.forward(numerics, {})
        ones, tops = first.backward(gains), second.backward(second.forward(numerics, {})[0])
        result = {}
        for path, uses in plan.layers.items():
            own: Scalar = 0.0
            for i in uses:
                own = plus(own, self._use(plan, path, i, outputs, ones[i], least(tops[i], ones[i])))
            node = plan.graph.nodes[uses[0]]
            assert node.layer is not None and node.op.module is not None
            size = math.sqrt(node.layer.dimension(node.op.module)) if self.p == 1 else 1.0
            fallback = times(size, evaluations[path].sensitivity)
            if plan.bounds.of("joint_cap", path) is not None:  # an l2 limit: nothing else is enforced there
                own = fallback
            result[path] = replace(evaluations[path], sensitivity=least(own, fallback))
        return result

    def _use(self, plan: Plan, path: str, index: int, outputs: list[Scalar], one: Scalar, top: Scalar) -> Scalar:
        """Bound of one use from its two factors; inf where the layer's kind has no entrywise rule."""
        node = plan.graph.nodes[index]
        module, op = node.op.module, node.op
        assert module is not None
        room = 1 + (math.prod(op.out_shape) + math.prod(op.shapes[0]) + 64) * _U  # norms and scales are float32
        bias = getattr(module, "bias", None)
        trains = isinstance(bias, Tensor) and bias.requires_grad
        beta = (plan.bounds.of("bias_scale", path) or 1.0) if trains else 0.0
        x = plan.inputs(index, outputs)[0]
        radius, cotangent = plan.limit("layer_radius", path), plan.limit("cotangent_radius", path)
        if radius is not None:
            x = least(x, times(room, radius))
        if cotangent is not None:
            one = least(one, times(room * math.sqrt(math.prod(op.out_shape)), cotangent))
            top = least(top, times(room, cotangent))
        n = math.prod(op.shapes[0])
        if isinstance(module, nn.Embedding):
            return one  # every position may hit one row
        linear = isinstance(module, nn.Linear)
        if not linear and not (isinstance(module, ConvNd) and module.padding_mode == "zeros"):
            return math.inf
        if self.p == 1:
            return times(one, plus(times(math.sqrt(n), x), beta))
        outer = linear and n == op.shapes[0][-1]  # one position: the gradient is an outer product
        return times(top if outer else one, x.clamp(min=beta) if isinstance(x, Tensor) else max(x, beta))


def fill_(noise: Tensor, dims: list[int], kind: KNorm, epsilon0: float, deltas: Tensor, streams: Streams, step: int):
    """Write one joint draw into the flat buffer, layer after layer (bias entries still times beta)."""
    mechanism = KNormMechanism(kind.p, epsilon0)
    parts = mechanism.sample(deltas.cpu(), dims, streams.numpy(NOISE + "/k-norm", step))
    noise.copy_(torch.from_numpy(np.concatenate(parts)))


def spread(kind: KNorm, dims: list[int], epsilon0: float, deltas: Tensor) -> Tensor:
    """Root mean square of one entry of each layer's noise: E r^2 = (D+1)(D+2)/epsilon0^2 times that of the ball."""
    total = sum(dims)
    square = {1: lambda d: 2 / ((d + 1) * (d + 2)), 2: lambda d: 1 / (d + 2), math.inf: lambda d: 1 / 3}[kind.p]
    parts = [math.sqrt((total + 1) * (total + 2) * square(d)) / epsilon0 for d in dims]
    return deltas * torch.tensor(parts, dtype=deltas.dtype, device=deltas.device)


def calibrate_epsilon0(
    target_epsilon: float, target_delta: float, q: float, steps: int, accountant: str, adjacency: Adjacency
) -> float:
    """The largest epsilon0 per step (to a relative 1e-3, from below) whose composition stays within the target."""

    def cost(log: float) -> float:
        spent = epsilon([Mechanism("pure", None, q, steps, math.exp(log))], target_delta, accountant, adjacency)
        return math.log(max(spent, 1e-300) / target_epsilon)

    # basic composition of sampled steps fits, one step alone at the whole target does not when there are more
    low, high = (math.log(math.log1p(math.expm1(min(t, 500.0)) / q)) for t in (target_epsilon / steps, target_epsilon))
    while cost(low) > 0:  # rounding
        low -= 0.1
    high = max(high, low + 0.1)
    while cost(high) <= 0:
        low, high = high, high + 0.3
    root = float(optimize.brentq(cost, low, high, xtol=5e-4))  # pyright: ignore[reportArgumentType]
    while cost(root) > 0:
        root -= 5e-4
    return math.exp(root)
