"""Any per-record function as a loss, with the user's bound made true."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightclip._torch import tree_flatten, tree_map
from weightclip.errors import ContractError
from weightclip.losses._base import Loss, Shape, _check_positive


@dataclass(frozen=True, init=False)
class PerRecordLoss(Loss):
    """A loss given as a function of raw outputs and labels that returns one value per record.

    The declared bound is enforced: each record's gradient is projected on the l2 ball of that radius, which changes
    nothing where the declaration is true. That the function treats records separately cannot be enforced; it is tested
    on random tensors of the same shapes at first use (or on `example`).

    Args:
        fn: function (z, y) -> values of shape (N,), differentiable in z.
        bound: l2 bound of one record's gradient at z; None where every layer is limited by a cap or by both radii,
            which needs no bound of the loss (the default bounds do).
        example: public (z, y) with at least two records, when random labels (0 or 1, or uniform in [0, 1)) will not do.

    Formal guarantees:
        As `Loss`, provided `fn` computes each record's value from that record alone: l2 and l∞ ≤ bound,
        l1 ≤ √n·bound, n outputs. Without a bound gradients are finite and nothing more: a model whose certificate
        needs one is refused. What `fn` raises on bad labels depends on the data and is not covered.
    """

    fn: Callable[[Tensor, Any], Tensor]
    cap: float | None
    example: tuple[Tensor, Any] | None = field(compare=False)
    _tested: set = field(compare=False, repr=False)

    def __init__(
        self, fn: Callable[[Tensor, Any], Tensor], bound: float | None = None,
        example: tuple[Tensor, Any] | None = None,
    ) -> None:  # fmt: skip
        if not callable(fn):
            raise ContractError(f"PerRecordLoss: fn must be a function (z, y) -> (N,), got {type(fn).__name__}")
        if bound is not None:
            _check_positive("PerRecordLoss", bound=bound)
        cap = None if bound is None else float(bound)
        for name, value in (("fn", fn), ("cap", cap), ("example", example), ("_tested", set())):
            object.__setattr__(self, name, value)
        if example is not None:
            self.check_records(*example)

    def check_records(self, z: Tensor, y: Any) -> None:
        """Test record independence on public numbers with the shapes of (z, y); ContractError where it fails."""
        leaves, tree = tree_flatten(y)
        key = (tree, tuple((t.shape[1:], t.dtype, t.device) for t in [z, *leaves] if isinstance(t, Tensor)))
        if key in self._tested or torch.compiler.is_compiling():
            return
        first, second = self._public(z, y, 0), self._public(z, y, 1)
        v, g = self._evaluate(*first)
        n = len(v)
        for i in range(n):  # put record i of the second draw into the first, then leave record i out
            others = [j for j in range(n) if j != i]
            swapped = tree_map(lambda a, b, i=i: _swap(a, b, i), first, second)
            fewer = tree_map(lambda a, o=others: a[o] if isinstance(a, Tensor) else a, first)
            for (v2, g2), keep in ((self._evaluate(*swapped), others), (self._evaluate(*fewer), slice(None))):
                if not (_same(v[others], v2[keep]) and _same(g[others], g2[keep])):
                    raise ContractError(
                        "PerRecordLoss: fn mixes records (changing or leaving out one record changed another's loss); "
                        "return each record's own value, without averages, sums or random numbers across records"
                    )
        self._tested.add(key)

    def _public(self, z: Tensor, y: Any, draw: int) -> tuple[Tensor, Any]:
        if self.example is not None:
            return tree_map(lambda t: t.roll(draw, 0) if isinstance(t, Tensor) else t, self.example)
        generator = torch.Generator().manual_seed(20_240_229 + draw)

        def like(t: Any, signed: bool = False) -> Any:
            if not isinstance(t, Tensor):
                return t
            shape = (3, *t.shape[1:])
            if not t.is_floating_point():
                return torch.randint(0, 2, shape, generator=generator).to(t.device, t.dtype)
            x = torch.randn(shape, generator=generator) if signed else torch.rand(shape, generator=generator)
            return x.to(t.device, t.dtype)

        return like(z, signed=True), tree_map(like, y)

    def _evaluate(self, z: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        """Values and gradient; differentiable once more where z asks for it."""
        create = torch.is_grad_enabled() and z.requires_grad
        with torch.enable_grad():
            x = z if create else z.detach().requires_grad_()
            v = self.fn(x, y)
            if not isinstance(v, Tensor) or v.shape != z.shape[:1]:
                got = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
                raise ContractError(
                    f"PerRecordLoss: fn must return one value per record, shape {tuple(z.shape[:1])}, got {got}; "
                    "use reduction='none' and average over positions"
                )
            if not v.requires_grad:
                raise ContractError("PerRecordLoss: fn does not depend differentiably on the outputs z")
            (g,) = torch.autograd.grad(v.sum(), x, create_graph=create)
        return v, g

    def _values(self, z: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        self.check_records(z, y)
        v = self.fn(z, y)
        return v, torch.isfinite(v)

    def _gradient(self, z: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        self.check_records(z, y)
        v, g = self._evaluate(z, y)
        return g, torch.isfinite(v)

    def _bound(self, shape: Shape, p: float) -> float:
        return math.inf  # nothing is known of fn itself; the cap is the bound


def _swap(a: Any, b: Any, i: int) -> Any:
    if not isinstance(a, Tensor):
        return a
    a = a.clone()
    a[i] = b[i]
    return a


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=1e-4, atol=1e-6, equal_nan=True)
