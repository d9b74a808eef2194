"""Each record's sums over its positions, found by the kernel that reads its factors for their norms.

The gradient of a bias (of a gain as well) is the sum of them, scaled: nothing is read again.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weightclip._torch import version_of
from weightclip.factors.kernels._products import _kernels, finished_scales, launch

_MANY = 64  # positions from which a record's sums over them are small beside what is summed
_WIDE, _DEPTH = 64, 64  # channels of a program, and positions that it reads at once
_LARGEST = 2**28  # numbers of a record: places are int32 in the kernel, whose loops step beyond the last one


class _Kept(NamedTuple):
    x: weakref.ref[Tensor]
    versions: tuple[int, int]
    totals: Tensor


def fits_totals(x: Tensor, d: Tensor, places: int) -> bool:
    """Whether sums over ``places`` positions are kept: they take little memory beside the factors.

    Known from the shape of one record, so that what a record adds does not depend on how many others there are, as
    long as records lie behind each other in memory.
    """
    size = max(x.numel(), d.numel()) // max(1, len(d))
    return places >= _MANY and size < _LARGEST and not x.is_inference() and not d.is_inference()


def keep(x: Tensor, d: Tensor, totals: Tensor) -> None:
    """Leave the sums with the cotangents, for :func:`kept` of these very factors."""
    holder: Any = d
    holder._wc_totals = _Kept(weakref.ref(x), (version_of(x), version_of(d)), totals)


def kept(x: Tensor, d: Tensor) -> Tensor | None:
    """What :func:`keep` left for these factors, once; None for any others, and if either was written to.

    Formal guarantees:
        The sums are those that the last norm of ``d`` came with: they lie on the tensor itself, and each norm with sums
        replaces them. If ``d`` were written to behind torch's back, what is added would still be what was measured.
    """
    holder: Any = d
    found: _Kept | None = holder.__dict__.pop("_wc_totals", None)
    if found is None or found.x() is not x or found.versions != (version_of(x), version_of(d)):
        return None
    return found.totals


def scale_and_totals(x: Tensor, d: Tensor, limits: Tensor, flags: int, bias: float) -> tuple[Tensor, Tensor]:
    """``fused_scale`` of (records, ..., channels), and each record's sums of d over positions: (records, 1, channels).

    Formal guarantees:
        The scales have those of ``fused_scale``, the sums (``over_records`` of them) those of ``tile_bias``. All
        numbers of a record follow from it alone: programs have blocks of channels, whatever the size of the batch.
    """
    records, channels = len(d), d.shape[-1]
    wide = min(_WIDE, 1 << (channels - 1).bit_length())
    blocks = 1 << (-(-channels // wide) - 1).bit_length()  # those beyond the last channel read inputs only
    found = torch.empty(records, blocks, 2, dtype=torch.float32, device=d.device)
    totals = torch.empty(records, 1, channels, dtype=torch.float32, device=d.device)
    x_size, d_size = (math.prod(t.shape[1:]) for t in (x, d))
    launch(
        _kernels().moments_and_totals, (records, blocks, 1),
        x, d, found, totals, x_size, d_size // channels, channels, x.stride(0), d.stride(0), wide, _DEPTH, num_warps=8,
    )  # fmt: skip
    return finished_scales(found, x_size, d_size, limits, flags, bias), totals
