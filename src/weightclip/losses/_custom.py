"""Any per-record function as a loss, with the user's bound made true."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightclip._torch import leaves_of, map_tensors, tensors_of
from weightclip.errors import ContractError
from weightclip.losses._base import Loss, Shape, _check_positive, _finite, _like_rows, _rows, _work


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
        trees: z may be whatever the model returns (several heads); False: of an output with ``.logits`` fn gets those.
        example: public (z, y) with at least two records, when random labels (0 or 1, or uniform in [0, 1)) will not do.

    Formal guarantees:
        As `Loss`, provided `fn` computes each record's value from that record alone: l2 and l∞ ≤ bound,
        l1 ≤ √n·bound, n outputs. Without a bound gradients are finite and nothing more: a model whose certificate
        needs one is refused. What `fn` raises on bad labels depends on the data and is not covered.
    """

    fn: Callable[[Tensor, Any], Tensor]
    cap: float | None
    example: tuple[Tensor, Any] | None = field(compare=False)
    trees: bool
    _tested: set = field(compare=False, repr=False)

    def __init__(
        self, fn: Callable[[Tensor, Any], Tensor], bound: float | None = None,
        example: tuple[Tensor, Any] | None = None, trees: bool = True,
    ) -> None:  # fmt: skip
        if not callable(fn):
            raise ContractError(f"PerRecordLoss: fn must be a function (z, y) -> (N,), got {type(fn).__name__}")
        if bound is not None:
            _check_positive("PerRecordLoss", bound=bound)
        cap = None if bound is None else float(bound)
        for name, value in (("fn", fn), ("cap", cap), ("example", example), ("trees", trees), ("_tested", set())):
            object.__setattr__(self, name, value)
        if example is not None:
            self.check_records(*example)

    @property
    def takes_trees(self) -> bool:  # type: ignore[override]
        """A function of the user's own may take whatever the model returns."""
        return self.trees

    def check_records(self, z: Any, y: Any) -> None:
        """Test record independence on public numbers with the shapes of (z, y); ContractError where it fails."""
        leaves = list(leaves_of((z, y)))
        key = tuple((path, t.shape[1:], t.dtype, t.device) for path, t in leaves if isinstance(t, Tensor))
        if key in self._tested or torch.compiler.is_compiling():
            return
        rows = next((t.shape[0] for t in tensors_of(z) if t.dim()), 0)
        for n in dict.fromkeys((3, max(2, rows))):  # few records, and as many as there are: some losses look at numbers
            self._check_size(z, y, n)
        self._tested.add(key)

    def _check_size(self, z: Any, y: Any, n: int) -> None:
        first, second = self._public(z, y, 0, n), self._public(z, y, 1, n)
        v, g = self._evaluate(*first)
        n = len(v)
        for i in {0, n // 2, n - 1}:  # put record i of the second draw into the first, then leave record i out
            others = [j for j in range(n) if j != i]
            new = iter(tensors_of(second))
            swapped = map_tensors(lambda a, i=i, new=new: _swap(a, next(new), i), first)
            fewer = map_tensors(lambda a, o=others: a[o] if a.dim() else a, first)
            for (v2, g2), keep in ((self._evaluate(*swapped), others), (self._evaluate(*fewer), slice(None))):
                pairs = [(v, v2), *zip(g, g2, strict=True)]
                if not all(_same(a[others], b[keep]) for a, b in pairs if a is not None and b is not None):
                    raise ContractError(
                        "PerRecordLoss: fn mixes records (changing or leaving out one record changed another's loss); "
                        "return each record's own value, without averages, sums or random numbers across records"
                    )

    def _public(self, z: Any, y: Any, draw: int, n: int) -> tuple[Any, Any]:
        if self.example is not None:
            return map_tensors(lambda t: t.roll(draw, 0) if t.dim() else t, self.example)
        generator = torch.Generator().manual_seed(20_240_229 + draw)

        def like(t: Tensor, signed: bool = False) -> Tensor:
            shape = (n, *t.shape[1:]) if t.dim() else ()
            if not t.is_floating_point():
                return torch.randint(0, 2, shape, generator=generator).to(t.device, t.dtype)
            x = torch.randn(shape, generator=generator) if signed else torch.rand(shape, generator=generator)
            return x.to(t.device, t.dtype)

        return map_tensors(lambda t: like(t, signed=True), z), map_tensors(like, y)

    def _evaluate(self, z: Any, y: Any) -> tuple[Tensor, list[Tensor | None]]:
        """Values and a gradient for each floating-point tensor of z; differentiable once more where z asks for it."""
        leaves = [t for t in tensors_of(z) if t.is_floating_point()]
        create = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
        with torch.enable_grad():
            if not create:
                z = map_tensors(lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, z)
                leaves = [t for t in tensors_of(z) if t.is_floating_point()]
            v = self.fn(z, y)
            rows = leaves[0].shape[:1]
            if not isinstance(v, Tensor) or v.shape != rows:
                got = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
                raise ContractError(
                    f"PerRecordLoss: fn must return one value per record, shape {tuple(rows)}, got {got}; "
                    "use reduction='none' and average over positions"
                )
            if not v.requires_grad:
                raise ContractError("PerRecordLoss: fn does not depend differentiably on the outputs z")
            g = torch.autograd.grad(v.sum(), leaves, create_graph=create, allow_unused=True)
        return v, list(g)

    def both_of_tree(self, z: Any, y: Any) -> tuple[Tensor, list[Tensor | None]]:
        """Values, and the gradient at each tensor of `z` that requires one (None where the loss does not look at it).

        Formal guarantees:
            As the class; with a bound, the gradients at all tensors together have at most that norm.
        """
        self.check_records(z, y)
        wanted = [t.requires_grad for t in tensors_of(z) if t.is_floating_point()]
        ok = torch.stack([_finite(_work(t)) for t in tensors_of(z) if t.is_floating_point() and t.dim()]).all(0)
        clean = map_tensors(
            lambda t: torch.where(_like_rows(ok, t), t, 0).detach() if t.is_floating_point() and t.dim() else t, z
        )
        v, found = self._evaluate(clean, y)
        gradients = [g for g, w in zip(found, wanted, strict=True) if w]
        rows = [_rows(_work(g)) for g in gradients if g is not None]
        ok = ok & torch.isfinite(v)
        for row in rows:
            ok = ok & _finite(row)
        scale = ok.to(rows[0].dtype)
        if self.cap is not None:
            norm = torch.stack([torch.linalg.vector_norm(r, dim=1, dtype=torch.float64) for r in rows]).norm(dim=0)
            scale = scale * (torch.clamp(self.cap / norm, max=1) * (1 - 2.0**-20)).nan_to_num(0.0).to(scale.dtype)
        masked = [g if g is None else torch.where(_like_rows(ok, g), g * _like_rows(scale, g), 0) for g in gradients]
        return torch.where(ok, v.detach(), 0), masked

    def _values(self, z: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        self.check_records(z, y)
        v = self.fn(z, y)
        return v, torch.isfinite(v)

    def _gradient(self, z: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        self.check_records(z, y)
        v, (g,) = self._evaluate(z, y)
        assert g is not None
        return g, torch.isfinite(v)

    def _bound(self, shape: Shape, p: float) -> float:
        return math.inf  # nothing is known of fn itself; the cap is the bound


def _swap(a: Tensor, b: Tensor, i: int) -> Tensor:
    if not a.dim():
        return a
    a = a.clone()
    a[i] = b[i]
    return a


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=1e-4, atol=1e-6, equal_nan=True)
