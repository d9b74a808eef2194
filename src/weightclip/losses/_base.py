"""What every loss with a known gradient bound has in common: masking, capping, rounding and the three dual norms."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weightclip.errors import ContractError, WeightclipError

Shape = tuple[int, ...]
Weights = float | Sequence | Tensor | None  # public constants; kept as (nested) tuples: hashable, comparable


class Loss(ABC):
    """A per-record loss that knows how steep it can be at the model's raw outputs.

    Subclasses are frozen dataclasses (a pure description) and implement `_values`, `_gradient` and `_bound`;
    masking of bad records, the cap and the rounding slack are added here, once, for all of them.

    Formal guarantees:
        For every record, every finite or non-finite output `z[i]` and every label, the row `gradient(z, y)[i]`
        depends on `z[i]` and `y[i]` alone, is finite, and its dual-exponent norm is at most
        `bound(z.shape[1:], p)`. Public inputs are the fields of the loss and the output shape only.
    """

    cap: float | None = None
    takes_trees = False  # whether outputs may be a tuple, mapping or dataclass of tensors (`both_of_tree`)

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        """Loss of each record, averaged over its own positions or outputs (their number is fixed by the shape).

        Records with non-finite outputs or invalid labels count 0: an error would tell something about the data.

        Args:
            z: raw outputs, records on dimension 0.
            y: labels, records on dimension 0.

        Returns:
            Tensor of shape (N,), float32 or better.
        """
        z = _work(z)
        finite = _finite(z)
        v, ok = self._values(torch.where(_like_rows(finite, z), z, 0), y)
        return torch.where(finite & ok & torch.isfinite(v), v, 0)

    def gradient(self, z: Tensor, y: Tensor) -> Tensor:
        """Per-record gradient at the raw outputs, exactly as training uses it (cap included).

        It is the gradient of `values`, except that a cap over several outputs rescales the record's gradient, which
        makes it no gradient field. Plain tensor operations: call it under `no_grad` unless you want to differentiate
        it (the falsifier does).

        Formal guarantees: see the class.
        """
        zf = _work(z)
        g, ok = self._gradient(zf, y)
        ok = ok & _finite(g + zf)  # one test for both: a non-finite term never cancels
        shrink = 1 - _slack(z.dtype, zf.dtype)
        if self.cap is None:
            g = g * shrink
        else:
            # In float64: over a million outputs float32 lost 7e-5 of the norm, and the bound with it.
            norm = torch.linalg.vector_norm(_rows(g), dim=1, dtype=torch.float64)
            g = g * _like_rows(shrink * torch.clamp(self.cap / norm, max=1), g).to(g.dtype)
        return g.masked_fill(_like_rows(~ok, g), 0).to(z.dtype)

    def both(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """`values` and `gradient`; a loss that can share work between them overrides this."""
        return self.values(z, y), self.gradient(z, y)

    def both_of_tree(self, z: Any, y: Any) -> tuple[Tensor, list[Tensor | None]]:
        """`values`, and the gradient at each tensor of `z` that requires one, for outputs that are no single tensor."""
        raise ContractError(f"{type(self).__name__} takes one tensor of outputs, got {type(z).__name__}")

    def bound(self, output_shape: Sequence[int], p: float = 2) -> float:
        """Upper bound of one record's gradient in the norm dual to a chain in `p` (SOUNDNESS, section 3).

        Args:
            output_shape: shape of the model's output without the record dimension.
            p: exponent of the chain; 2 bounds the l2 norm, inf the l1 norm, 1 the l∞ norm.

        Formal guarantees: see the class.
        """
        if p not in (1, 2, math.inf):
            raise WeightclipError(f"loss bound: p = {p} has no rule; use 1, 2 or inf")
        shape = tuple(int(n) for n in output_shape)
        natural = self._bound(shape, p)
        return natural if self.cap is None else min(natural, self._cap_bound(shape, p))

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        """Mean of `values`, so that the object also serves as an ordinary criterion."""
        return self.values(z, y).mean()

    @abstractmethod
    def _values(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Per-record values and validity, for finite `z` in working precision."""

    @abstractmethod
    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Per-record gradient before the cap and validity, in working precision."""

    @abstractmethod
    def _bound(self, shape: Shape, p: float) -> float:
        """Dual norm bound without the cap."""

    def _cap_bound(self, shape: Shape, p: float) -> float:
        """Dual norm bound that follows from the l2 cap alone."""
        assert self.cap is not None
        return self.cap * math.sqrt(math.prod(shape)) if p == math.inf else self.cap


def _work(z: Tensor) -> Tensor:
    return z if z.dtype == torch.float64 else z.float()


@functools.cache
def _slack(stored: torch.dtype, work: torch.dtype) -> float:
    # The bound is a statement about stored numbers: shrink by what softmax, norms and the last cast can round up.
    slack = 8 * torch.finfo(work).eps
    return slack if stored == work else slack + torch.finfo(stored).eps / 2


def _rows(t: Tensor) -> Tensor:
    return t.flatten(1) if t.dim() > 1 else t.unsqueeze(1)  # N x (everything of one record)


def _finite(t: Tensor) -> Tensor:
    return (_rows(t) * 0).sum(1) == 0  # NaN where anything is not finite; several times faster than isfinite().all()


def _like_rows(r: Tensor, t: Tensor) -> Tensor:
    return r.reshape(r.shape + (1,) * (t.dim() - 1))  # N -> N x 1 x ... x 1


def _mean_rows(t: Tensor) -> Tensor:
    return _rows(t).mean(1)


def _check_cap(owner: str, cap: float | None) -> None:
    if cap is not None and not (0 < cap < math.inf):
        raise WeightclipError(f"{owner}: cap = {cap} must be a positive finite number (or None for no cap)")


def _check_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not (0 < value < math.inf):
            raise WeightclipError(f"{owner}: {name} = {value} must be a positive finite number")


def _freeze_weights(owner: str, name: str, weights: object) -> Weights:
    """Turn public weights (tensor, list, tuple, number) into nested tuples of non-negative finite floats."""
    if weights is None:
        return None
    t = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    if not bool((torch.isfinite(t) & (t >= 0)).all()):
        raise WeightclipError(f"{owner}: {name} must be finite and non-negative")

    def nested(x: object) -> object:
        return tuple(nested(i) for i in x) if isinstance(x, list) else x

    return nested(t.tolist())  # type: ignore[return-value]


def _alike(y: Tensor, z: Tensor) -> bool:
    """Whether the shapes differ at most by dimensions of one entry."""
    same = [n for n in y.shape[1:] if n != 1] == [n for n in z.shape[1:] if n != 1]
    return y.shape[:1] == z.shape[:1] and same


def _match_target(owner: str, z: Tensor, y: Tensor) -> Tensor:
    """Targets in the shape of the outputs; (N,) and (N, 1) are taken for each other, and never broadcast."""
    if y.shape == z.shape:
        return y.to(z.dtype)
    if _alike(y, z):
        return y.to(z.dtype).reshape(z.shape)
    raise ContractError(
        f"{owner}: targets of shape {tuple(y.shape)} do not match outputs {tuple(z.shape)}; give one target per output"
    )
