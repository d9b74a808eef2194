"""Weight gradients on tensor cores with exact sums over records, and exact norms of records' gradients (SOUNDNESS 8).

A record's product over its positions is formed from 16-bit or TF32 operands and accumulated in float32 by tiles that
begin and end with the record: what is rounded there is its own contribution, whoever else is in the batch. The float32
tile is scaled and added in float64, or in float32 where draws are small enough that the sensitivity can cover it. The
same products, squared and summed instead, are the record's norm; Gram matrices of positions are, where they need less
arithmetic. No per-record gradient is ever stored.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weightclip.factors._limits import CANCELLED
from weightclip.factors.kernels._products import fits, fused_moments, launch

FEWEST = 16  # positions below which float64 products are as fast: the tile would be mostly padding
WIDEST_GRAM = 128  # positions whose Gram matrix is one tile
UNIT = 2.0**-22  # of one addition on tensor cores, which truncate, twice over
_WAVES = 264  # programs: two for each multiprocessor of a large GPU
_ADDED = 2**15  # rows of a group times records of the largest draw: float32 sums of that size cost 0.4% of sensitivity
_FEWEST_GROUPED = 16  # rows of a group from which float32 sums are worth it
_PARTS = 16  # of a sum, that are added in float32
_ROOM = 2**27  # numbers that all parts of a sum may take
_TINIEST = torch.finfo(torch.float32).tiny


class Window(NamedTuple):
    """A 2-D convolution's fixed numbers; a dense layer over positions is one of size 1 over a row of them."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


POINT = Window()


def fits_tiles(x: Tensor, d: Tensor, places: int, convolution: bool) -> bool:
    """Whether tiles can take these factors: on a GPU with Triton, 16 bits each, or float32 where TF32 is allowed."""
    if not x.is_cuda or x.dtype != d.dtype or places < FEWEST:
        return False
    # float64 products of dense layers are as fast as TF32 ones, whose operands must be turned over first
    return fits(x, d) and (x.dtype != torch.float32 or (convolution and _tf32_allowed()))


def tile_rounding(places: int) -> float:
    """Share of ||x|| ||delta|| by which a record's float32 product over so many positions may be off."""
    return (places + 8) * UNIT


def tile_group(b_max: int) -> int:
    """How many rows are added in float32 before anything else is done with their sum; 0: sums are float64.

    ``b_max`` is the public size of the largest draw: the larger it is, the more a rounding may move.
    """
    group = _ADDED // max(1, b_max)
    return group if group >= _FEWEST_GROUPED else 0


def tile_additions(group: int) -> int:
    """Float32 additions that an entry of the sum goes through after its record's product is formed (`sum_slack`)."""
    return group + _PARTS + 1 if group else 0


def tile_sums(
    x: Tensor, d: Tensor, scale: Tensor | None, window: Window = POINT, stored: torch.dtype = torch.float64,
    group: int = 0,
) -> Tensor:  # fmt: skip
    """sum_n scale_n (gradient of record n) as (out, in, kernel height, kernel width), a view of channels last.

    Args:
        x: (records, in, height, width); dense layers: (records, positions, in).
        d: (records, out, height, width), or (records, positions, out).
        scale: (records,) or None; records with scale zero take no part, whatever they hold.
        window: The convolution.
        stored: What the sum may be stored in, once, if a copy can be saved; it is float64 otherwise.
        group: Rows that may be added in float32, as :func:`tile_group` says; 0: none.

    Formal guarantees:
        Record n adds scale_n T_n with T_n a function of its own x and d alone: float32 sums over its positions that
        start from zero, in an order that neither the batch nor the record's place in it changes. Products of 16-bit
        numbers are exact in float32, so ||T_n - exact|| <= (positions + 8) 2^-22 ||x_n|| ||d_n||, x_n its patch
        matrix: `sum_slack` has that share. TF32 operands are cut towards zero first, so that no norm grows. Tiles are
        scaled in float32 and added in float64 (with no atomics): over records nothing is rounded to less. With a
        ``group`` an entry goes through at most ``tile_additions(group)`` float32 additions of records, which
        `sum_slack` counts for the largest draw (SOUNDNESS Theorem 24, 3).
    """
    flat = _flat(x, d, window)
    how = tiling(flat.outs, flat.columns, flat.places, x.dtype, group > 0)
    if -(-flat.records // max(1, group)) * flat.outs * flat.columns > _ROOM:
        group = 0  # too many parts to store: the same products, added in float64
    elif group and scale is None:  # Triton would add products inside of the next one
        scale = torch.ones(flat.records, device=x.device)
    parts = _parts(flat, how, group)
    share = -(-flat.records // parts)
    parts = -(-flat.records // share)
    single = group > 0 or (parts == 1 and stored == torch.float32)
    kind = torch.float32 if single else torch.float64
    found = torch.empty(parts, flat.outs, flat.columns, dtype=kind, device=x.device)
    _launch(flat, scale, found, share, parts, False, group > 0, how)
    # few float32 parts are added in float32, as `tile_additions` counts, all others in float64
    whole = found[0] if parts == 1 else found.sum(0, dtype=None if parts <= _PARTS else torch.float64)
    high, wide = window.kernel
    channels = flat.columns // (high * wide)
    return whole.as_strided((flat.outs, channels, high, wide), (flat.columns, 1, wide * channels, channels))


def _parts(flat: _Flat, how: Tiling, group: int) -> int:
    """How many programs share the records of a tile: enough to fill the device, few enough to add up."""
    across = -(-flat.outs // how.rows) * -(-flat.columns // (how.cols * how.halves))
    if not group:
        return max(1, min(flat.records, _WAVES // across))
    least = -(-flat.records // group)
    size = how.rows * how.cols * how.halves
    slots = _processors(flat.d.get_device()) * max(1, 2**14 // size)
    # seconds of a tile over all records, and of storing and adding up one more part
    tile, part = 2 * flat.records * flat.places * size / 5e12, 8 * flat.outs * flat.columns / 4e12
    wanted = range(least, max(least, min(_PARTS, flat.records)) + 1)
    return min(wanted, key=lambda p: -(-across * p // slots) / p * tile + (p - 1) * part)


@functools.cache
def _processors(device: int) -> int:
    """Multiprocessors of a GPU; those of a large one in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 132


def tile_norms(x: Tensor, d: Tensor, beta: float, window: Window = POINT, counts: Tensor | None = None) -> Tensor:
    """Norm of each record's gradient (weight and beta times bias) as ``tile_sums`` forms it, infinite if not finite.

    ``counts`` says in how many patches each position of the input lies; None: one.

    Formal guarantees:
        Never less than the norm of T_n, nor than CANCELLED times the product of its factors' norms. By tiles the
        squares are those of float32 products of the same operands; by Grams (fewer multiplications where positions are
        few) the float32 inner products may be off by their rounding, counted in full: 2^-22 for each summand on tensor
        cores (compilers add inside of products) and 2^-24 for each other addition, times the squared product of the
        factors' norms.
    """
    flat, sums = _flat(x, d, window), None
    grams = by_grams(flat.places, flat.columns, flat.outs)
    together = grams and x.dtype != torch.float32  # a bias adds up cotangents as they are, not as TF32 cuts them
    squares, share = _grams(flat, beta if together else 0.0) if grams else (_squares(flat), 0.0)
    if beta and not together:
        sums = torch.linalg.vector_norm(flat.d.sum(1, dtype=torch.float32), dim=1)
    x_size, d_size = x.numel() // len(x), d.numel() // len(d)
    found = fused_moments(flat.x.permute(0, 3, 1, 2), flat.d, counts)
    out = torch.empty(flat.records, dtype=torch.float32, device=x.device)
    # room for the rounding of the float32 sums behind both norms, which the limit has too
    share, rounding = share * (1 + 2.0**-8), tile_rounding(flat.places) * (1 + 2.0**-8)
    launch(
        _norm_kernels().finish_exact, (flat.records, 1, 1),
        found, squares, out if sums is None else sums, out, _TINIEST * x_size * math.prod(window.kernel),
        _TINIEST * d_size, beta**2 * flat.places, beta**2, share, rounding, CANCELLED, squares.shape[1],
        sums is not None, 128, found.shape[1], num_warps=1,
    )  # fmt: skip
    return out


def _tf32_allowed() -> bool:
    """Whether torch may convolve float32 numbers as TF32 on GPUs."""
    backends: Any = torch.backends
    return backends.cudnn.conv.fp32_precision == "tf32"


def by_grams(places: int, columns: int, outs: int) -> bool:
    """Whether norms by Gram matrices of positions take less arithmetic than by products; a choice by shapes alone."""
    return places <= WIDEST_GRAM and places * (columns + outs) < columns * outs


class Tiling(NamedTuple):
    """Rows, columns and positions of a tile, tiles beside each other in a program, warps, stages of its pipeline."""

    rows: int
    cols: int
    halves: int
    depth: int
    warps: int
    stages: int


def tiling(outs: int, columns: int, places: int, dtype: torch.dtype, grouped: bool = False) -> Tiling:
    """How a layer's product is cut into tiles, by its shape."""
    if dtype == torch.float32:
        return Tiling(_power(outs, 128), _power(columns, 64), 1, _power(places, 32), 4, 3)
    if grouped and outs >= 128 and columns >= 128 and 64 < places <= 128:
        return Tiling(128, 64, 2, 128, 8, 3)
    if places <= 64 and outs >= 128 and columns >= 128:
        return Tiling(128, 128, 1, _power(places, 64), 8, 4 if places <= 32 else 3)
    few = places <= 128 or outs <= 64
    return Tiling(_power(outs, 64 if few else 128), _power(columns, 64), 1, _power(places, 128 if few else 64), 4, 3)


def _power(size: int, most: int) -> int:
    """The smallest power of two that is no less, from 16 to ``most``."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


class _Flat(NamedTuple):
    """Both factors with channels last, as the kernels read them."""

    x: Tensor  # (records, height, width, in)
    d: Tensor  # (records, positions, out), contiguous
    wide: int  # positions in a row
    window: Window

    @property
    def records(self) -> int:
        return self.d.shape[0]

    @property
    def places(self) -> int:
        return self.d.shape[1]

    @property
    def outs(self) -> int:
        return self.d.shape[2]

    @property
    def columns(self) -> int:
        return self.x.shape[3] * math.prod(self.window.kernel)

    def shape(self) -> list[int]:
        """What the kernels take as constants."""
        window, x = self.window, self.x
        return [x.shape[3], self.columns, self.places, self.wide, window.kernel[1], *window.stride, *window.padding,
                *window.dilation, self.outs]  # fmt: skip


def _flat(x: Tensor, d: Tensor, window: Window) -> _Flat:
    if x.dim() == 4:
        x, d = (t.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1) for t in (x, d))
        wide = d.shape[2]
        x = x if x.is_contiguous() else x.contiguous()  # strides of sizes one are free
        return _Flat(x, d.reshape(d.shape[0], -1, d.shape[3]).contiguous(), wide, window)
    x, d = x.contiguous(), d.contiguous()
    return _Flat(x.unsqueeze(1), d, d.shape[1], window)


def _launch(
    flat: _Flat, scale: Tensor | None, out: Tensor, share: int, parts: int, squares: bool, grouped: bool, how: Tiling
) -> None:  # fmt: skip
    x, d = flat.x, flat.d
    launch(
        _kernels().tiles, (-(-flat.outs // how.rows), -(-flat.columns // (how.cols * how.halves)), parts),
        x, d, x if scale is None else scale, out, flat.records, share, x.shape[1], x.shape[2], *x.stride()[:3],
        d.stride(0), *flat.shape(), scale is not None, squares, grouped, x.dtype == torch.float32, not x.is_cuda,
        how.halves, how.rows, how.cols, how.depth, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip


def _squares(flat: _Flat) -> Tensor:
    """Sums of squares of each record's product: (records, tiles)."""
    how = tiling(flat.outs, flat.columns, flat.places, flat.x.dtype)
    across = -(-flat.outs // how.rows) * -(-flat.columns // how.cols)
    share = max(1, flat.records * across // (4 * _WAVES))
    found = torch.empty(flat.records, across, dtype=torch.float32, device=flat.d.device)
    _launch(flat, None, found, share, -(-flat.records // share), True, False, how)
    return found


def _grams(flat: _Flat, beta: float) -> tuple[Tensor, float]:
    """Squared norms by records, (records, 1), and the share of the factors' norms they may be off."""
    whole = _power(flat.places, WIDEST_GRAM)
    depth, warps = 64 if flat.x.dtype != torch.float32 else 32, 8 if whole > 64 else 4
    found = torch.empty(flat.records, 1, dtype=torch.float32, device=flat.d.device)
    x, d = flat.x, flat.d
    launch(
        _kernels().grams, (flat.records, 1, 1),
        x, d, found, x.shape[1], x.shape[2], beta**2, *x.stride()[:3], d.stride(0), *flat.shape(),
        x.dtype == torch.float32, not x.is_cuda, whole, depth, num_warps=warps, num_stages=4,
    )  # fmt: skip
    # all summands of both inner products on tensor cores; additions of a thread's entries, then across threads
    plain = whole * whole // (32 * warps) + 16
    return found, (flat.columns + flat.outs + 16) * UNIT + plain * 2.0**-24


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("weightclip.factors.kernels._tiles_triton")


@functools.cache
def _norm_kernels() -> Any:
    return importlib.import_module("weightclip.factors.kernels._products_triton")
