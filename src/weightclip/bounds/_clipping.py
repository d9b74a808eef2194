"""ClipWeights: keep each layer's operator norm below C, after the optimiser's step (SOUNDNESS, sections 1.5 and 3).

A strategy is called as ``strategy(weight, C, norm_fn)``: it changes ``weight`` in place and returns a certified upper
bound of the norm of the weight *as stored*, rounding to its dtype included. ``norm_fn`` is a certified norm as a
function of the weight (``weightclip.bounds.norm_function(module, p)``). All strategies are post-processing of released
weights: they read no data. None reads a value back to the host, but on an accelerator torch's SVD
(``SpectralProjection``) does so itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightclip.bounds._layer_norms import ConvNorm, DenseNorm, NormFunction, is_layer, norm_function
from weightclip.bounds._operator_norms import frobenius, spectral_norm
from weightclip.errors import CertificationError

# Room for float64 arithmetic, so that a clipped layer's bound is at most C and rescaling twice changes nothing.
_ROOM = 1.0 - 2.0**-38


class Strategy(ABC):
    """How weights are brought under a norm bound."""

    @abstractmethod
    def __call__(self, weight: Tensor, C: float, norm_fn: NormFunction) -> Tensor:
        """Change ``weight`` in place so that ``norm_fn(weight) <= C``, the public bound.

        Returns:
            0-dim float64 tensor: certified upper bound of the norm of the stored weight. At most C, unless a weight is
            not finite: then NaN (or inf).

        Formal guarantees:
            The bound is at least the layer's operator norm in ``norm_fn``'s exponent, for the weight as rounded to its
            dtype. The result depends on the weight, C and the geometry alone.
        """


@dataclass(frozen=True)
class Rescale(Strategy):
    """θ ← θ·min(1, C/‖θ‖): the paper's ClipWeights. Weights already inside are left as they are, bit by bit."""

    @torch.no_grad()
    def __call__(self, weight: Tensor, C: float, norm_fn: NormFunction) -> Tensor:
        norm = norm_fn(weight)
        if norm.device.type == "cpu" and bool(norm <= C):  # nothing to do, and nothing to wait for
            return norm
        return _scale_to(weight, norm, C, norm_fn, norm > C)  # False for NaN: such weights stay, and their bound is NaN


@dataclass(frozen=True)
class Sphere(Strategy):
    """θ ← θ·C/‖θ‖ (Fix-Lip): the certified norm becomes C up to rounding, never more. Zero weights stay zero."""

    @torch.no_grad()
    def __call__(self, weight: Tensor, C: float, norm_fn: NormFunction) -> Tensor:
        norm = norm_fn(weight)
        return _scale_to(weight, norm, C, norm_fn, norm > 0)


@dataclass(frozen=True)
class SpectralProjection(Strategy):
    """Singular values of the weight matrix are cut at C: the Euclidean projection on the spectral ball.

    Dense weights: ‖W‖₂ ≤ C, the nearest such matrix. Convolutions: the singular values of each group's kernel matrix R
    are cut at C/√m, so that √m·‖R‖₂ ≤ C (m the overlap); this is the projection on that set, not on the larger set of
    kernels of operator norm ≤ C. A certified rescale follows, which for p = 2 only absorbs rounding and for p = 1 or ∞
    (whose norms the projection does not bound) does the rest.
    """

    @torch.no_grad()
    def __call__(self, weight: Tensor, C: float, norm_fn: NormFunction) -> Tensor:
        matrices, m = _matrices(weight, norm_fn)
        a = matrices.double()
        finite = a.isfinite().all(-1).all(-1)[..., None, None]
        u, s, vh = torch.linalg.svd(torch.where(finite, a, torch.zeros_like(a)), full_matrices=False)
        excess = (s - C * _inside(weight.dtype) / math.sqrt(m)).clamp_min(0.0)
        # Subtracting what is too much leaves weights inside the ball exactly as they were.
        excess = torch.where((s > C / math.sqrt(m)).any(-1, keepdim=True), excess, torch.zeros_like(excess))
        weight.copy_((a - (u * excess[..., None, :]) @ vh).reshape(weight.shape))
        return Rescale()(weight, C, norm_fn)


@dataclass(frozen=True)
class Bjorck(Strategy):
    """Björck orthonormalisation: all singular values of the weight matrix are driven towards C (kernel: C/√m).

    The matrix is divided by a certified bound of its norm, so that its singular values lie in [0, 1]; each iteration
    A ← A·(I + ½Q + ⅜Q² + …), Q = I − AᵀA, truncated after ``order`` terms, maps [0, 1] into itself and pushes every
    positive singular value towards 1. What holds afterwards: *all singular values ≤ C (C/√m)*, enforced by a certified
    rescale at the end; how near to C the smaller ones are depends on ``iterations`` and is not guaranteed (zero ones
    stay zero).
    """

    iterations: int = 15
    order: int = 1

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.order < 1:
            raise CertificationError(
                f"Bjorck(iterations={self.iterations}, order={self.order}): both have to be at least 1"
            )

    @torch.no_grad()
    def __call__(self, weight: Tensor, C: float, norm_fn: NormFunction) -> Tensor:
        matrices, m = _matrices(weight, norm_fn)
        a = matrices.double()
        wide = a.shape[-2] < a.shape[-1]
        if wide:
            a = a.mT  # Q on the smaller side
        norm = spectral_norm(a)[..., None, None]
        a = a / torch.where(norm > 0, norm, torch.ones_like(norm))
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        for _ in range(self.iterations):
            q = eye - a.mT @ a
            # Horner's scheme for (1 − q)^(−1/2): each coefficient is (2i − 1)/(2i) times the one before.
            series = eye
            for i in range(self.order, 0, -1):
                series = eye + (2 * i - 1) / (2 * i) * (q @ series)
            a = a @ series
        a = a * (C * _inside(weight.dtype) / math.sqrt(m))
        weight.copy_((a.mT if wide else a).reshape(weight.shape))
        return Rescale()(weight, C, norm_fn)


def clip_weights_(
    module: nn.Module,
    C: float | Mapping[str, float],
    strategy: Strategy | None = None,
    p: float = 2,
    *,
    input_sizes: Mapping[str, int | Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """Bring the Linear, Conv and ConvTranspose layers of a module under a norm bound, in place.

    Args:
        module: a model, or one layer (its name is then ``""``).
        C: one bound for all those layers, or {``named_modules()`` path: bound} for the layers named only.
        strategy: how; ``Rescale()``, the paper's, by default.
        p: exponent of the operator norm, 1, 2 or inf.
        input_sizes: {path: spatial input size} of convolutions, for tighter bounds
            (``operator_norm_bound(input_size=)``).

    Returns:
        {path: certified bound of the stored weights}, 0-dim float64 tensors on each weight's device.

    Raises:
        CertificationError: an unknown name, a bound that is not positive, a weight that is recomputed from other
            parameters (clipping those does not bound it), or one weight shared by layers with different bounds.

    Formal guarantees:
        Afterwards ``operator_norm_bound(layer, p) <= C`` up to a relative 1e-6. Post-processing: reads weights only.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> with torch.no_grad():
        ...     _ = layer.weight.copy_(torch.diag(torch.tensor([3.0, 0.5])))
        >>> bounds = clip_weights_(layer, 1.0, SpectralProjection())
        >>> bool(bounds[""] <= 1.0), [round(v, 4) for v in layer.weight.diag().tolist()]
        (True, [1.0, 0.5])
    """
    strategy = Rescale() if strategy is None else strategy
    layers = {name: layer for name, layer in module.named_modules() if is_layer(layer)}
    limits = dict(C) if isinstance(C, Mapping) else dict.fromkeys(layers, C)
    for names, what in ((limits, "C"), (input_sizes or {}, "input_sizes")):
        unknown = sorted(set(names) - set(layers))
        if unknown:
            raise CertificationError(
                f"clip_weights_: {what} names {unknown[0]!r}, which is no Linear or Conv layer of the model; "
                f"it has {', '.join(map(repr, layers)) or 'none'}"
            )
    work: dict[int, tuple[str, nn.Parameter, float, DenseNorm | ConvNorm]] = {}
    owner: dict[str, int] = {}
    for name, limit in limits.items():
        if not (limit > 0 and math.isfinite(limit)):
            raise CertificationError(f"clip_weights_: C for {name!r} is {limit}, it has to be positive and finite")
        weight = _own_weight(layers[name], name)
        norm_fn = norm_function(layers[name], p, (input_sizes or {}).get(name))
        first = work.setdefault(id(weight), (name, weight, float(limit), norm_fn))
        if first[2:] != (float(limit), norm_fn):
            raise CertificationError(
                f"clip_weights_: {name!r} and {first[0]!r} share one weight under different bounds; give them the same"
            )
        owner[name] = id(weight)
    bounds = {key: strategy(weight, limit, norm_fn) for key, (_, weight, limit, norm_fn) in work.items()}
    return {name: bounds[key] for name, key in owner.items()}


def _scale_to(weight: Tensor, norm: Tensor, C: float, norm_fn: NormFunction, chosen: Tensor) -> Tensor:
    """Where chosen, θ ← s·θ with the largest s for which s·θ *rounded to its dtype* has norm at most a bound ≤ C.

    Returns that bound, and the norm as it was elsewhere.

    Rounding moves each entry by at most u·s|θ| (or by half a subnormal), hence the norm by at most u·s·‖θ‖_p for p = 1,
    ∞ and by √m·‖·‖_F of the change for p = 2; the sum of both covers every exponent, and every bound in ``norm_fn``.
    """
    info = torch.finfo(weight.dtype)
    u = info.eps / 2 * (1.0 + 2.0**-12)  # the float64 product may be rounded by way of float32
    rows, columns = max(1, weight.shape[0]), max(1, weight.shape[1])
    m = _matrices(weight, norm_fn)[1]
    spread = max(math.sqrt(m * weight.numel()), weight.numel() / rows, weight.numel() / columns)
    # Only float16's subnormals are coarse enough to matter; others might be flushed to zero.
    tiny = 2.0**-24 if weight.dtype == torch.float16 else info.tiny
    moved = norm + u * (norm + math.sqrt(m) * frobenius(weight))
    scale = max(0.0, C * _ROOM - spread * tiny) / moved
    chosen = chosen & scale.isfinite()
    weight.copy_(weight.double() * torch.where(chosen, scale, torch.ones_like(scale)))
    return torch.where(chosen, scale * moved * (1.0 + 2.0**-50) + spread * tiny, norm)


def _inside(dtype: torch.dtype) -> float:
    """A target just below C, so that rounding to the dtype seldom calls for the final rescale."""
    return 1.0 - 4.0 * torch.finfo(dtype).eps


def _matrices(weight: Tensor, norm_fn: NormFunction) -> tuple[Tensor, int]:
    """(kernel matrices, overlap m). A norm function of unknown geometry gets the largest overlap there is."""
    if isinstance(norm_fn, (DenseNorm, ConvNorm)):
        return norm_fn.matrices(weight), norm_fn.overlap(weight)
    return weight.reshape(1, weight.shape[0], -1), math.prod(weight.shape[2:])


def _own_weight(layer: nn.Module, name: str) -> nn.Parameter:
    """The layer's weight parameter, if that is what its forward uses."""
    weight = layer._parameters.get("weight")
    named = getattr(layer, "effective_weight", None)
    if not isinstance(weight, nn.Parameter) or (callable(named) and named() is not weight):
        raise CertificationError(
            f"clip_weights_: {name!r} ({type(layer).__name__}) computes its weight from other parameters, and clipping "
            "those does not bound it: pass C as a dict without it"
        )
    return weight
