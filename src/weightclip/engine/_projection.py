"""What enters a private model: each record projected on a ball, and without entries that are not finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._torch import map_tensors
from weightclip.factors import is_plain, transforming
from weightclip.factors.kernels import fits, project

_HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def project_records(x: Tensor, radius: float, detach: bool = False) -> Tensor:
    """Each record's l2 projection on the ball of ``radius``; a record with a NaN or infinite entry becomes zeros.

    Args:
        x: Floating-point records on dimension 0.
        radius: Public radius; infinite: only non-finite records change.
        detach: Treat the scale as constant in the backward pass (non-expansive in every norm).

    Formal guarantees:
        l2 norm of each record at most ``radius`` up to float32 rounding, whatever its entries; l2 gain 1; records are
        never mixed.
    """
    if x.dim() < 2:
        return project_records(x.unsqueeze(1), radius, detach).squeeze(1) if x.dim() else x
    dims = tuple(range(1, x.dim()))
    wide = x.float() if x.dtype in _HALF else x
    if not x.requires_grad and wide.dtype == torch.float32 and not transforming():
        return _project_values(wide, radius * (1 - _HALF.get(x.dtype, 0.0)), dims).to(x.dtype)
    largest = torch.linalg.vector_norm(wide.detach(), math.inf, dims, keepdim=True)  # not finite if an entry is not
    finite = torch.isfinite(largest)
    clean = torch.where(finite, wide, torch.zeros((), dtype=wide.dtype, device=x.device))
    if math.isinf(radius):
        return clean.to(x.dtype)
    radius = radius * (1 - _HALF.get(x.dtype, 0.0))  # rounding to half precision must not lead out of the ball
    # entries are divided by the largest one first: squares neither overflow nor vanish
    tiny = torch.finfo(wide.dtype).tiny
    largest = torch.where(finite, largest, torch.full_like(largest, tiny)).clamp(min=tiny)
    unit = clean / largest
    norm = torch.linalg.vector_norm(unit.detach() if detach else unit, 2, dims, keepdim=True).clamp(min=0.5)
    inside = largest * norm.detach() <= radius  # norm is at least 1 but for a zero record
    return torch.where(inside, clean, unit * (radius / norm)).to(x.dtype)


def _project_values(x: Tensor, radius: float, dims: tuple[int, ...]) -> Tensor:
    """The same in few passes, where no derivative is asked for: squares of float32 fit into float64."""
    if x.device.type == "cpu" and radius >= 1e-10:  # smaller norms may be squares that vanish
        if math.isinf(radius) and math.isfinite(x.sum().item()):  # an entry that is not finite would show in the sum
            return x
        norm = torch.linalg.vector_norm(x, 2, dims, keepdim=True)
        scaled = x if math.isinf(radius) else x * _over(radius, norm).clamp_(max=1.0)
        if x.shape[0] == 0 or float(norm.max()) < 1e15:  # no NaN, and no square is infinite: float32 will do
            return scaled
        good = (norm < 1e15).flatten()
        # the way a record takes depends on itself alone: the others must not round differently because of it
        scaled = scaled.clone() if scaled is x else scaled
        scaled[~good] = _project_widely(x[~good], radius, dims)
        return scaled
    return project(x, radius) if fits(x) else _project_widely(x, radius, dims)


def _over(radius: float, norm: Tensor) -> Tensor:
    """``radius / norm`` as torch computes it, in fewer passes."""
    return norm.reciprocal() if radius == 1 else norm.reciprocal().mul_(radius)


def _project_widely(x: Tensor, radius: float, dims: tuple[int, ...]) -> Tensor:
    """For records of any size, by norms in float64."""
    norm = torch.linalg.vector_norm(x, 2, dims, keepdim=True, dtype=torch.float64)
    if math.isinf(radius):
        scaled = x
    else:  # in two steps: the scale of a huge record may be subnormal, and would round up to twice its value
        scale = (radius / norm).clamp(max=1.0)  # a zero record: min(inf, 1)
        scaled = (x * scale.clamp(min=2.0**-100).float()).mul_((scale * 2.0**100).clamp(max=1.0).float())
    return torch.where(torch.isfinite(norm), scaled, torch.zeros((), device=x.device))


class InputProjection:
    """Forward pre-hook: every floating-point tensor among the arguments, named or nested, is projected.

    Formal guarantees:
        Those of :func:`project_records`, for each argument on its own.
    """

    _weightclip = True

    def __init__(self, radius: float = math.inf, detach: bool = False) -> None:
        self.radius, self.detach = radius, detach

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if is_plain():
            return None
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # the usual case
            return (self._project(args[0]),), kwargs
        return map_tensors(self._project, (args, kwargs))

    def _project(self, x: Tensor) -> Tensor:
        return project_records(x, self.radius, self.detach) if x.is_floating_point() else x
