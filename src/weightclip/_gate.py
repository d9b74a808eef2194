"""Doors of a private model: what enters is projected, and gradients come in through the certified loss alone."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.factors import is_plain


class InputProjection:
    """Forward pre-hook: each record's floating-point input becomes finite and, with a radius, lies in the l2 ball.

    Formal guarantees:
        l2 norm of each record of each floating-point input at most ``radius``; a non-finite record becomes zeros.
        1-Lipschitz per record; records are never mixed.
    """

    _weightclip = True

    def __init__(self, radius: float = math.inf) -> None:
        self.radius = radius

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if is_plain():
            return args
        return tuple(self._project(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    def _project(self, x: Tensor) -> Tensor:
        dims = tuple(range(1, x.dim()))
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        square = wide.square().sum(dims, keepdim=True) if dims else wide.square()
        finite = torch.isfinite(square)
        if math.isinf(self.radius):
            # a finite record whose square overflows is kept: only enforced factors will meet it
            finite = torch.isfinite(wide).all(1, keepdim=True) if x.dim() == 2 else _all_finite(wide, dims)
            return torch.where(finite, x, torch.zeros((), dtype=x.dtype, device=x.device))
        clean = torch.where(finite, wide, torch.zeros((), dtype=wide.dtype, device=x.device))
        safe = torch.where(finite, square, torch.zeros_like(square)).clamp(min=self.radius**2)
        return (clean * (self.radius * safe.rsqrt()).clamp(max=1.0)).to(x.dtype)


def _all_finite(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    good = torch.isfinite(x)
    for dim in dims:
        good = good.all(dim, keepdim=True)
    return good


class Claim:
    """Hook on one output of the model: passes the certified loss's gradient and nothing else."""

    def __init__(self, output: Tensor) -> None:
        self.output = weakref.ref(output)
        self.gradient: Tensor | None = None

    def __call__(self, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if self.gradient is None else self.gradient.to(gradient.dtype)

    def take(self, logits: Tensor, gradient: Tensor) -> bool:
        """Lay ``gradient`` (at ``logits``) out as the output; False when logits are no view of this output."""
        output = self.output()
        if output is None or output.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
            return False
        full = torch.empty_strided(output.shape, output.stride(), dtype=gradient.dtype, device=gradient.device).zero_()
        offset = logits.storage_offset() - output.storage_offset()
        full.as_strided(logits.shape, logits.stride(), offset).copy_(gradient)
        self.gradient = full
        return True


class OutputGate:
    """Forward hook that puts a :class:`Claim` on every differentiable output (SOUNDNESS section 1, step 2).

    A backward pass through an output that the private criterion has not claimed delivers zeros, and what reaches a
    claimed output is replaced by the criterion's own gradient: extra loss terms and scalings change nothing.
    """

    _weightclip = True

    def __init__(self, engine: Any) -> None:
        self.engine: weakref.ref[Any] | None = weakref.ref(engine)
        self.claims: list[Claim] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # inside torch.compile the criterion's own hook on the logits does this work
        if torch.compiler.is_compiling() or is_plain():
            return
        if isinstance(output, Tensor) and output.requires_grad and self.engine is not None:
            claim = Claim(output)
            output.register_hook(claim)
            self.claims.append(claim)

    def __getstate__(self) -> dict[str, Any]:
        return {"engine": None, "claims": []}  # copies and saved models leave the engine behind

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputGate:
        copy = OutputGate.__new__(OutputGate)
        copy.__dict__.update(self.__getstate__())
        return copy
