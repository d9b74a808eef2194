"""Cross-entropy with temperature, smoothing, class weights, and a cap or an envelope; of language models too."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.errors import ContractError, WeightclipError
from weightclip.factors.kernels import cross_entropy, fits_classes
from weightclip.losses._base import (
    Loss,
    Shape,
    Weights,
    _check_positive,
    _check_weights,
    _freeze_weights,
    _like_rows,
    _rows,
    _slack,
)
from weightclip.losses._envelope import constrained_softmax


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Softmax cross-entropy over classes on dimension 1, averaged over a record's positions.

    Labels are class indices (N, positions...) or class probabilities in the shape of the outputs. Positions labelled
    `ignore_index` contribute nothing and still count in the average. Any other index out of range, or a row of
    probabilities with a negative or non-finite entry or without mass, makes the whole record contribute zero; rows
    that do not sum to one are normalised.

    Attributes:
        temperature: τ, the loss is CE(z/τ).
        scale_by_temperature: use τ·CE(z/τ) instead, whose bound does not depend on τ.
        smoothing: s, labels become (1 − s)·y + s/C.
        class_weights: non-negative weight of each class; a tensor or sequence, kept as a tuple.
        cap: B, an l2 bound on each record's gradient. For two classes and one position the capped gradient is that
            of a Huberised logistic loss (and `values` is that loss); otherwise it is per-record clipping of a small
            vector. Under a cap, the gradient for class probabilities without smoothing is also kept within the l1
            bound of index labels, so that one bound serves both.
        envelope: use min_u l(u) + B·||z − u||₂, a true B-Lipschitz loss for any number of classes, instead of
            clipping. Costs 10 (index labels, B ≤ 1) to 60 evaluations of a softmax-like function in float64.
        ignore_index: label of positions to leave out.

    Formal guarantees:
        As `Loss`, for any labels. Without a cap, one position: l2 ≤ √(1+(1−s)²−s²/C) (√2 for s = 0), l1 ≤ 2(1−s/C),
        l∞ ≤ 1−s/C, each times the largest class weight (exactly: its sup over labels) and 1/τ; S positions:
        1/√S, 1 and 1/S of that.
    """

    temperature: float = 1.0
    scale_by_temperature: bool = False
    smoothing: float = 0.0
    class_weights: Weights = None
    cap: float | None = None
    envelope: bool = False
    ignore_index: int = -100

    def __post_init__(self) -> None:
        _check_positive("CrossEntropy", temperature=self.temperature, cap=1.0 if self.cap is None else self.cap)
        if not 0 <= self.smoothing <= 1:
            raise WeightclipError(f"CrossEntropy: smoothing = {self.smoothing} must lie in [0, 1]")
        if self.envelope and self.cap is None:
            raise WeightclipError("CrossEntropy: envelope=True needs its Lipschitz constant; give cap=B")
        weights = _freeze_weights("CrossEntropy", "class_weights", self.class_weights)
        if weights is not None and (not isinstance(weights, tuple) or any(isinstance(w, tuple) for w in weights)):
            raise WeightclipError("CrossEntropy: class_weights must be one number per class")
        object.__setattr__(self, "class_weights", weights)

    def _values(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        v = z / self.temperature
        target, mass, ok = self._target(v, y)
        if self.cap is not None and (self.envelope or math.prod(z.shape[1:]) == 2):
            p, unit = self._envelope(v, target, mass, self._one_hot(y))
            v = v.double().movedim(1, -1)
            v = v - v.amax(-1, keepdim=True)
            p = p.detach()  # at the maximum of the dual, moving p changes nothing: the derivative is p − y
            dual = (p - unit) * v - torch.xlogy(p, p)
            v = dual.sum(-1).to(z.dtype) * mass.squeeze(1)
        else:
            logp = torch.log_softmax(v, 1)
            v = -torch.where(target > 0, target * logp, 0).sum(1)
        return self._outer() * _rows(v).mean(1), ok

    def both(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Shares the softmax in the usual case: class indices, one position, no weights, no cap."""
        usual = self._one_hot(y) and self.class_weights is None and self.cap is None and z.dim() == 2
        if not usual or z.dtype != torch.float32 or y.dim() != 1:
            return super().both(z, y)
        factor = self._outer() / self.temperature * (1 - _slack(z.dtype, z.dtype))
        if z.is_cuda and fits_classes(z, y):
            self._check_labels(z, y)
            return cross_entropy(z, y, self.ignore_index, self.temperature, self._outer(), factor)
        v = z if self.temperature == 1 else z / self.temperature
        if z.device.type == "cpu" and self._all_usual(v, y):  # what follows, bit for bit, with every mask true
            logp, classes, outer = torch.log_softmax(v, 1), y.long(), self._outer()
            values = F.nll_loss(logp, classes, reduction="none")
            g = logp.exp_().scatter_(1, classes.unsqueeze(1), -1.0, reduce="add")
            return values if outer == 1 else values.mul_(outer), g if factor == 1 else g.mul_(factor)
        index, good, ok = self._index(v, y)
        logp = torch.log_softmax(v, 1)
        mass = good.to(v.dtype)
        values = logp.gather(1, index).squeeze(1)
        ok = ok & torch.isfinite(values) & torch.isfinite(z.sum(1))
        g = (logp.exp() * mass).scatter_add(1, index, -mass)
        values = torch.where(ok, values * (-self._outer()) * mass.squeeze(1), 0)
        return values, (g if factor == 1 else g * factor).masked_fill(~ok[:, None], 0)

    def _all_usual(self, v: Tensor, y: Tensor) -> bool:
        """Whether every label is a class that counts and no output is near overflow."""
        if v.shape[0] == 0 or y.shape != v.shape[:1] or v.shape[1] < 2:
            return False
        low, high = (int(bound) for bound in torch.aminmax(y))
        least, most = (float(bound) for bound in torch.aminmax(v))  # NaN if one is
        ignored = low <= self.ignore_index <= high
        far = 1e30 / max(1.0, self.temperature)  # neither v nor v times the temperature
        return low >= 0 and high < v.shape[1] and not ignored and least > -far and most < far

    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        v = z if self.temperature == 1 else z / self.temperature
        scale = self._outer() / (self.temperature * math.prod(z.shape[2:]))
        if self._one_hot(y) and self.class_weights is None and not self.envelope:  # the usual case, in few passes
            index, good, ok = self._index(v, y)
            mass = good.to(v.dtype) * scale
            return (torch.softmax(v, 1) * mass).scatter_add(1, index, -mass), ok
        target, mass, ok = self._target(v, y)
        if self.envelope:
            p, unit = self._envelope(v, target, mass, self._one_hot(y))
            return (p - unit).movedim(-1, 1).to(z.dtype) * (mass * scale), ok
        g = (torch.softmax(v, 1) * mass - target) * scale
        if self.cap is not None and y.is_floating_point() and self.smoothing == 0:
            limit = self._cap_bound(tuple(z.shape[1:]), math.inf)  # see `cap` in the class docstring
            l1 = torch.linalg.vector_norm(_rows(g), ord=1, dim=1, dtype=torch.float64)
            g = g * _like_rows(torch.clamp(limit / l1, max=1), g).to(g.dtype)
        return g, ok

    def _one_hot(self, y: Tensor) -> bool:
        return self.smoothing == 0 and not y.is_floating_point()

    def _outer(self) -> float:
        return self.temperature if self.scale_by_temperature else 1.0

    def _envelope(self, v: Tensor, target: Tensor, mass: Tensor, one_hot: bool) -> tuple[Tensor, Tensor]:
        """The constrained probabilities and the labels on the simplex, classes last, in float64.

        One position's share of the loss is k·l(z/τ), k = outer·mass/S. Its gradient k/τ·(p − y) may have norm B/√S, so
        that a record's S positions together reach at most B.
        """
        assert self.cap is not None
        n = math.prod(v.shape[2:])
        v, target, mass = (x.double().movedim(1, -1) for x in (v, target, mass))
        radius = self.cap * self.temperature * math.sqrt(n) / (self._outer() * mass)  # inf where mass = 0
        unit = target / mass.clamp(min=torch.finfo(torch.float64).tiny)
        weights = self.class_weights if isinstance(self.class_weights, tuple) else (1.0,)
        lightest = min([w for w in weights if w > 0] or [1.0])
        widest = self.cap * self.temperature * math.sqrt(n) / (self._outer() * lightest)
        return constrained_softmax(v, unit, radius, one_hot and widest <= 1), unit

    def _target(self, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted label distribution (like v), its mass (N x 1 x positions) and the validity of each record."""
        self._check_shape(tuple(v.shape[1:]))
        classes = v.shape[1]
        column = (classes,) + (1,) * (v.dim() - 2)
        if y.is_floating_point():
            if y.shape != v.shape:
                raise ContractError(
                    f"CrossEntropy: floating labels are class probabilities and need the outputs' shape "
                    f"{tuple(v.shape)}, got {tuple(y.shape)}; use integers for class indices"
                )
            target = y.to(v.dtype)
            total = target.sum(1, keepdim=True)
            good = (target >= 0).all(1, keepdim=True) & torch.isfinite(total) & (total > 0)
            target = torch.where(good, target / total, 0)
            ok = _rows(good).all(1)
        else:
            index, good, ok = self._index(v, y)
            target = (index == torch.arange(classes, device=v.device).reshape(column)).to(v.dtype)
        mass = good.to(v.dtype)
        if self.smoothing:
            target = target * (1 - self.smoothing) + self.smoothing / classes
        if self.class_weights is not None:
            target = target * torch.tensor(self.class_weights, dtype=v.dtype, device=v.device).reshape(column)
        target = target * mass
        return target, mass if self.class_weights is None else target.sum(1, keepdim=True), ok

    def _index(self, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Class indices made safe and the positions that count (both N x 1 x positions), and each record's validity."""
        self._check_labels(v, y)
        y = y.long().unsqueeze(1)
        index = y.clamp(0, v.shape[1] - 1)
        known, ignored = y == index, y == self.ignore_index
        return index, known & ~ignored, _rows(known | ignored).all(1)

    def _check_labels(self, v: Tensor, y: Tensor) -> None:
        self._check_shape(tuple(v.shape[1:]))
        if y.shape != v.shape[:1] + v.shape[2:]:
            raise ContractError(
                f"CrossEntropy: labels of shape {tuple(y.shape)} do not match outputs {tuple(v.shape)}; "
                f"expected class indices of shape {tuple(v.shape[:1] + v.shape[2:])}"
            )

    def _check_shape(self, shape: Shape) -> None:
        if len(shape) < 1 or shape[0] < 2:
            raise ContractError(
                f"CrossEntropy: output shape {shape} has no two classes on its first dimension; "
                "use losses.BCEWithLogits for a single logit"
            )
        _check_weights("CrossEntropy", self.class_weights, shape)

    def _bound(self, shape: Shape, p: float) -> float:
        self._check_shape(shape)
        classes, n = shape[0], math.prod(shape[1:])
        # SOUNDNESS Theorem 19: the gradient Σ_c v_c(p − e_c), v the weighted smoothed label, is largest at vertices
        # p = e_k, label j, where it is Σ_{c≠k} v_c(e_k − e_c); norms grow with every v_c, so the best k has least v_k.
        w = torch.ones(classes, dtype=torch.float64)
        if self.class_weights is not None:
            w = torch.tensor(self.class_weights, dtype=torch.float64)
        base = w * self.smoothing / classes
        own = base + (1 - self.smoothing) * w  # v_j for label j; the other entries are base
        left_out = base.min().minimum(own)  # a label j with the least weight is no maximum: k = j may be allowed
        total = base.sum() - base + own - left_out
        if p == 2:
            squares = (base**2).sum() - base**2 + own**2 - left_out**2
            sup = float((total**2 + squares).max().sqrt()) / math.sqrt(n)
        else:
            sup = 2 * float(total.max()) if p == math.inf else float(total.max()) / n
        return sup * self._outer() / self.temperature

    def _cap_bound(self, shape: Shape, p: float) -> float:
        """Each position's gradient sums to zero over classes, which relates its norms better than √numel does."""
        assert self.cap is not None
        classes, n = shape[0], math.prod(shape[1:])
        if p == 2:
            return self.cap
        if p == 1:
            return self.cap * math.sqrt((classes - 1) / classes)
        # l1 ≤ 2√(k(C−k)/C)·l2 with k negative entries: k = 1 for an index label, any k for a distribution.
        k = 1 if self.smoothing == 0 and not self.envelope else classes // 2
        return self.cap * 2 * math.sqrt(n * k * (classes - k) / classes)


@dataclass(frozen=True)
class CausalLM(Loss):
    """Cross-entropy of the next token, averaged over all positions of a sequence, those without a label included.

    Outputs are (N, T, vocabulary), labels (N, T), usually the tokens themselves: position t is compared with label
    t + 1, as models of transformers do given ``labels=``. Their own ``.loss`` is a mean over the labelled tokens of the
    whole batch, whose number is private; here the divisor is T - 1 for everyone.

    Attributes:
        ignore_index: label of positions to leave out.

    Formal guarantees:
        As `Loss`: those of `CrossEntropy` with T - 1 positions.
    """

    ignore_index: int = -100

    @property
    def _inner(self) -> CrossEntropy:
        return CrossEntropy(ignore_index=self.ignore_index)

    def _values(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self._inner._values(*_shifted(z, y))

    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g, ok = self._inner._gradient(*_shifted(z, y))
        return torch.nn.functional.pad(g.movedim(1, -1), (0, 0, 0, 1)), ok

    def _bound(self, shape: Shape, p: float) -> float:
        positions, vocabulary = shape
        return self._inner._bound((vocabulary, positions - 1), p)


def _shifted(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if z.dim() != 3 or y.shape != z.shape[:2] or z.shape[1] < 2:
        raise ContractError(
            f"CausalLM: labels of shape {tuple(y.shape)} for outputs {tuple(z.shape)}; give (records, T, vocabulary) "
            "and (records, T), T at least 2"
        )
    return z[:, :-1].movedim(-1, 1), y[:, 1:]
