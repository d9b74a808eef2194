"""Weight gradients on CUDA in one kernel: records are scaled, multiplied and summed in float64 without any copy.

A float32 sum over a batch may move by several times one record's contribution when that record is added (SOUNDNESS
Theorems 21 and 24); in float64 it does not. Tensor cores multiply in float64 about as fast as others do in float32, so
the only price to avoid is that of float64 copies: this kernel reads activations and cotangents as they lie in memory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weightclip.factors._limits import KIND_SHIFT, SMALLEST, TINY, transforming
from weightclip.factors.kernels._launch import launch

_TOGETHER = 1 << 30  # multiply-adds below which a launch costs more than what a bias slows the larger kernel down
_PROGRAMS = 1056  # about eight for each multiprocessor of a large GPU
_DEPTH = 16  # positions that are multiplied at once
_FARTHEST = 2**31 - 2**23  # places are int32 in the kernels, whose loops step beyond the last one
_MOST = 1 << 15  # records of one launch, which takes 65,535 at most
_TOTALS = 1 << 23  # sums of single records that are kept between two steps
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits(x: Tensor, d: Tensor) -> bool:
    """Whether the kernel can take these tensors: CUDA, at most float32, and Triton is at hand."""
    if not x.is_cuda or x.dtype not in _DTYPES or d.dtype not in _DTYPES or transforming():
        return False
    return d.numel() > 0 and triton_found() and max(_reach(x), _reach(d), d.numel()) < _FARTHEST


def weight_gradient(
    x: Tensor, d: Tensor, scale: Tensor | None, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], bias: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """sum_n scale_n (gradient of record n) of a 2-D convolution's weight and, if asked, of its bias, in float64.

    Args:
        x: (records, in, height, width), any strides.
        d: (records, out, height, width), cotangents.
        scale: (records,) or None; records with scale zero take no part, whatever they hold.
        kernel: Size of the kernel; likewise stride, padding, dilation.
        bias: Whether the sums of cotangents are wanted too; otherwise the second result is None.

    Formal guarantees:
        Each record's cotangent is scaled in float32; products and sums are float64 throughout, with no atomics: the
        same numbers for the same tensors. Records with scale 0 contribute exact zeros, NaN or not.
    """
    x, d = _easily_read(x, d, stride)
    out, columns = d.shape[1], x.shape[1] * kernel[0] * kernel[1]
    total = d.shape[0] * d.shape[2] * d.shape[3]
    together = bias and total * out * columns < _TOGETHER
    tiles = math.prod(_tiles(out, columns))
    parts = max(1, min(-(-total // (4 * _DEPTH)), _PROGRAMS // tiles))
    share = -(-total // (parts * _DEPTH)) * _DEPTH
    parts = -(-total // share)
    found = torch.empty(parts, out, columns + together, dtype=torch.float64, device=x.device)
    _launch_products(x, d, scale, found, share, (kernel, stride, padding, dilation), together, False)
    whole, channels = found if parts == 1 else found.sum(0), x.shape[1]
    across = columns + together
    # one view instead of a slice, a view and a permutation: small networks wait for the host
    weight = whole.as_strided((out, channels, *kernel), (across, 1, kernel[1] * channels, channels))
    if not bias:
        return weight, None
    return weight, whole.as_strided((out,), (across,), columns) if together else record_sums(d.flatten(2), scale)[0]


def gradient_squares(
    x: Tensor, d: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Squared norm of each record's gradient of a 2-D convolution's weight: (records,), float64; no gradient is stored.

    Formal guarantees:
        Products, squares and sums are float64, with no atomics. The gradient is that of `weight_gradient` without
        scales but for the order of its sums. Not finite where the gradient is not.
    """
    x, d = _easily_read(x, d, stride)
    tiles, share = math.prod(_tiles(d.shape[1], x.shape[1] * kernel[0] * kernel[1])), d.shape[2] * d.shape[3]
    found = torch.empty(d.shape[0], tiles, dtype=torch.float64, device=x.device)
    for start in range(0, d.shape[0], _MOST):
        part, window = slice(start, start + _MOST), (kernel, stride, padding, dilation)
        _launch_products(x[part], d[part], None, found[part], share, window, False, True)
    return found.sum(1)


def _easily_read(x: Tensor, d: Tensor, stride: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Both as float32 (older compilers cannot widen 16 bits here), channels last where rows are short or rough."""
    x, d = (t if t.dtype == torch.float32 else t.float() for t in (x, d))
    if x.shape[1] >= 16 and (d.shape[3] % 16 or tuple(stride) != (1, 1)):
        x, d = (t.contiguous(memory_format=torch.channels_last) for t in (x, d))
    return x, d


def _tiles(outs: int, columns: int) -> tuple[int, int]:
    """How many tiles a gradient has along both sides."""
    return -(-outs // _tile(outs)), -(-columns // _tile(columns))


def _launch_products(
    x: Tensor, d: Tensor, scale: Tensor | None, found: Tensor, share: int, window: tuple[Sequence[int], ...],
    bias: bool, squares: bool,
) -> None:  # fmt: skip
    kernel, stride, padding, dilation = window
    out, columns = d.shape[1], x.shape[1] * kernel[0] * kernel[1]
    launch(
        _kernels().products, (*_tiles(out, columns), found.shape[0]),
        x, d, x if scale is None else scale.contiguous(), found, x.shape[1], x.shape[2], x.shape[3], out, d.shape[2],
        d.shape[3], d.shape[0] * d.shape[2] * d.shape[3], share, columns, *x.stride(), *d.stride(), kernel[1], *stride,
        *padding, *dilation, scale is not None, x.stride(1) == 1 and x.shape[1] > 1, bias, squares, _tile(out),
        _tile(columns), _DEPTH, num_warps=4, num_stages=3,
    )  # fmt: skip


def dense_gradient(
    x: Tensor, d: Tensor, scale: Tensor | None, bias: bool = False
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """sum_n scale_n delta_n x_n^T over records and positions; x (records, ..., in), d (records, ..., out)."""
    if x.dim() == 2:
        x, d = x[:, :, None, None], d[:, :, None, None]
    else:
        x, d = (t.reshape(t.shape[0], -1, t.shape[-1]).transpose(1, 2).unsqueeze(3) for t in (x, d))
    weight, sums = weight_gradient(x, d, scale, (1, 1), (1, 1), (0, 0), (1, 1), bias)
    return weight[:, :, 0, 0], sums


def laid_out(gradient: Tensor, parameter: Tensor, wide: bool = False) -> Tensor:
    """In the parameter's type (``wide``: in its own) and order of entries, in one copy: as it is, foreach operators
    take it."""
    kind = gradient.dtype if wide else parameter.dtype
    if gradient.dtype == kind and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=kind).copy_(gradient)


def record_sums(d: Tensor, scale: Tensor | None, x: Tensor | None = None) -> Tensor:
    """Per channel, sum_n scale_n (sum over positions of d) and, with ``x``, of d x: 1 or 2 x channels, float64.

    torch would make a float64 copy of ``d`` first. ``d`` and ``x`` are (records, channels, positions), any strides.

    Formal guarantees:
        Each record's cotangent is scaled in float32; products and sums are float64, with no atomics; a record with
        scale 0 adds exact zeros.
    """
    channels, total = d.shape[1], d.shape[0] * d.shape[2]
    last = d.stride(1) == 1 and channels > 1
    if last and d.shape[2] >= 16 and d.shape[0] * channels <= _TOTALS:
        return _by_records(d, scale, x)
    wide = min(64, 1 << (channels - 1).bit_length()) if last else 1
    depth = 1024 // wide
    across = -(-channels // wide)
    parts = max(1, min(-(-total // (4 * depth)), 2 * _PROGRAMS // across))
    share = -(-total // (parts * depth)) * depth
    parts = -(-total // share)
    other, factor = d if x is None else x, d if scale is None else scale.contiguous()
    found = torch.empty(parts, 1 if x is None else 2, channels, dtype=torch.float64, device=d.device)
    launch(
        _kernels().sums, (across, parts, 1),
        other, d, factor, found, channels, d.shape[2], total, share, *other.stride(),
        *d.stride(), scale is not None, x is not None, wide, depth, num_warps=4,
    )  # fmt: skip
    return found[0] if parts == 1 else found.sum(0)


def _by_records(d: Tensor, scale: Tensor | None, x: Tensor | None, single: bool = False) -> Tensor:
    """``record_sums`` in two steps, over positions and over records: faster where channels lie last."""
    records, channels, positions = d.shape
    rows, other = (1, d) if x is None else (2, x)
    kind = torch.float32 if single else torch.float64
    totals = torch.empty(records, rows, channels, dtype=kind, device=d.device)
    wide = min(128, 1 << (channels - 1).bit_length())
    launch(
        _kernels().record_totals, (records, -(-channels // wide), 1),
        other, d, d if scale is None else scale.contiguous(), totals, channels, positions, *other.stride(),
        *d.stride(), scale is not None, x is not None, single, wide, 64 if single else 32, num_warps=8,
    )  # fmt: skip
    return over_records(totals, None)


def over_records(totals: Tensor, scale: Tensor | None) -> Tensor:
    """sum_n scale_n totals_n of (records, rows, channels) in float64; a record with scale 0 adds exact zeros.

    Formal guarantees:
        Each total is scaled in its own type, rounded once, and added in float64.
    """
    found = torch.empty(totals.shape[1:], dtype=torch.float64, device=totals.device)
    launch(
        _kernels().over_records, (-(-found.numel() // 32), 1, 1),
        totals, totals if scale is None else scale.contiguous(), found, totals.shape[0], found.numel(),
        scale is not None, 32, 64, num_warps=4,
    )  # fmt: skip
    return found


def tile_bias(d: Tensor, scale: Tensor | None) -> Tensor:
    """sum_n scale_n (sum over positions of d) beside ``tile_sums``: float64, one number for each channel.

    Args:
        d: (records, positions, channels).
        scale: (records,) or None.

    Formal guarantees:
        Record n adds scale_n times a float32 sum over its own positions, in an order that neither the batch nor its
        place changes, off by at most (positions + 8) 2^-24 sqrt(positions) ||d_n||, as a column of ones in the product
        would be: `tile_rounding` has that share. Records are added in float64.
    """
    return _by_records(d.transpose(1, 2), scale, None, True)[0]


def fits_scale(x: Tensor, d: Tensor, flags: int) -> bool:
    """Whether :func:`fused_scale` can take these tensors: each record in one piece, no measured caps."""
    return fits(x, d) and flags < 1 << KIND_SHIFT and flags > 0 and _dense(x) and _dense(d)


def fused_scale(
    x: Tensor, d: Tensor, limits: Tensor, flags: int, bias: float, counts: Tensor | None = None
) -> Tensor:  # fmt: skip
    """The scale of each record by one kernel, as ``record_scale`` of the norms of both factors.

    Args:
        x: (records, ...) inputs; for a convolution (records, channels, ...) with ``counts``.
        d: (records, ...) cotangents.
        limits: (3,) as in ``record_scale``.
        flags: Which of them are enforced.
        bias: beta^2 times positions, part of the input factor.
        counts: Weight of each position's squares, float32; None: one.

    Formal guarantees:
        Those of ``record_scale``: norms are float32 sums of nonnegative numbers, so that the certificate's allowance
        for their rounding holds in any order; a record with a non-finite factor gets 0. How many programs share a
        record follows from the size of the batch, and with it the last bits of a scale (place: SOUNDNESS section 8).
    """
    x_size, d_size, tiny = x.numel() // len(x), d.numel() // len(d), torch.finfo(torch.float32).tiny
    if shares(len(x), max(x_size, d_size)) > 1:
        return finished_scales(fused_moments(x, d, counts), x_size, d_size, limits, flags, bias)
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    last = counts is not None and x.shape[1] > 1 and x.stride(1) == 1
    launch(
        _kernels().scales, (x.shape[0], 1, 1),
        x, d, x if counts is None else counts, limits, out, x_size, d_size, x.stride(0), d.stride(0),
        1 if counts is None else counts.numel(), tiny * x_size, tiny * d_size, float(bias), counts is not None,
        x.shape[1] if last else 0, flags, TINY, SMALLEST, _at_once(x_size, d_size), num_warps=4,
    )  # fmt: skip
    return out


def finished_scales(found: Tensor, x_size: int, d_size: int, limits: Tensor, flags: int, bias: float) -> Tensor:
    """Scales from sums of squares: (records, shares, 2), shares a power of two."""
    out, tiny = torch.empty(len(found), dtype=torch.float32, device=found.device), torch.finfo(torch.float32).tiny
    launch(
        _kernels().finish_scales, (len(found), 1, 1),
        found, limits, out, tiny * x_size, tiny * d_size, float(bias), flags, TINY, SMALLEST, found.shape[1],
        num_warps=1,
    )  # fmt: skip
    return out


def fused_moments(x: Tensor, d: Tensor, counts: Tensor | None = None) -> Tensor:
    """Sums of squares of each record's inputs (weighted by ``counts``) and cotangents: (records, shares, 2), float32.

    Where records are few, several programs share one; the sum over shares is that of the record.
    """
    x_size, d_size = x.numel() // len(x), d.numel() // len(d)
    splits = shares(len(x), max(x_size, d_size))
    found = torch.empty(x.shape[0], splits, 2, dtype=torch.float32, device=x.device)
    last = counts is not None and x.shape[1] > 1 and x.stride(1) == 1
    launch(
        _kernels().moments, (x.shape[0], splits, 1),
        x, d, x if counts is None else counts, found, x_size, d_size, x.stride(0), d.stride(0),
        1 if counts is None else counts.numel(), counts is not None, x.shape[1] if last else 0,
        4096 if splits > 1 else _at_once(x_size, d_size), num_warps=8 if splits > 1 else 4,
    )  # fmt: skip
    return found


def shares(records: int, size: int) -> int:
    """Programs that share a record: enough to keep a large GPU busy, a power of two."""
    if size <= 16384 or records >= _PROGRAMS // 2:
        return 1
    wanted = min(_PROGRAMS // records, size // 4096)
    return 1 << (wanted.bit_length() - 1)


def _at_once(*sizes: int) -> int:
    """Numbers a program reads at once."""
    return 1024 if max(sizes) > 512 else 128


def fused_norms(x: Tensor, d: Tensor, bias: float, counts: Tensor | None = None) -> Tensor:
    """The product of the norms of each record's two factors, infinite where one is not finite; as ``fused_scale``."""
    return fused_scale(x, d, x, 8, bias, counts)


def channel_scale(
    x: Tensor, d: Tensor, limits: Tensor | None, flags: int, beta: float, rounding: float = 0.0,
    totals: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of a gain and an offset per channel: each record's scale, or without limits the norm of its gradient.

    Args:
        x: (records, channels, positions), any strides, likewise ``d``.
        limits: (3,) as in ``record_scale``; the input factor is the largest channel's.
        flags: Which of them are enforced.
        beta: Weight of the offset.
        rounding: Share of the sum of |d x| + beta |d| by which sums may be off; part of the norm.
        totals: (records, 2, channels), float64; if given, filled with each record's sums of d and of d x.

    Formal guarantees:
        Sums are float64. A record with a non-finite factor gets scale 0 or an infinite norm.
    """
    records, count, places = d.shape
    wide = min(64, 1 << (count - 1).bit_length())
    depth = min(1024 // wide, 1 << (places - 1).bit_length())
    blocks = -(-count // wide)
    found = torch.empty(records, 4, blocks, dtype=torch.float64, device=d.device)
    out, tiny = torch.empty(records, dtype=torch.float32, device=d.device), torch.finfo(torch.float32).tiny
    exact = limits is None
    launch(
        _kernels().channels, (records, blocks, 1),
        x, d, found, found if totals is None else totals, count, places, *x.stride(), *d.stride(), exact,
        totals is not None, wide, depth, num_warps=4,
    )  # fmt: skip
    launch(
        _kernels().finish_channels, (records, 1, 1),
        found, found if limits is None else limits, out, blocks, float(beta), float(places), tiny * places,
        tiny * places * count, float(rounding), exact, flags, TINY, SMALLEST, 1 << (blocks - 1).bit_length(),
        num_warps=1,
    )  # fmt: skip
    return out


def _dense(t: Tensor) -> bool:
    """Whether each record's entries lie together, positions or channels fastest."""
    return t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last))


def _reach(t: Tensor) -> int:
    """Entries of memory from a record's first to its last: the kernels add up places within a record in int32."""
    if t.is_contiguous():
        return t.numel()
    return sum((n - 1) * step for n, step in zip(t.shape[1:], t.stride()[1:], strict=True)) + 1


def _tile(size: int) -> int:
    return 64 if size > 32 else 32 if size > 16 else 16


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("weightclip.factors.kernels._products_triton")


@functools.cache
def triton_found() -> bool:
    return importlib.util.find_spec("triton") is not None
