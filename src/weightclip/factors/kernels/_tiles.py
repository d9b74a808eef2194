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
PLANES: tuple[torch.dtype, ...] = (torch.float32,)
"""Types whose plain tensors (N, C, H, W) are read as they lie; of others, and with (), tiles read copies with channels
last. TF32 products want positions beside each other, 16-bit ones take either."""
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
    how = flat.tiling(group > 0)
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
    across = math.prod(flat.tiles(how))
    if not group and not flat.plain:
        return max(1, min(flat.records, _WAVES // across))
    size = how.rows * how.cols * how.halves
    slots = _processors(flat.d.get_device()) * max(1, (2**14 if group else 2**13) // size)
    return _cheapest(flat.records, flat.places, across, size, flat.outs * flat.columns, slots, group)


@functools.lru_cache(maxsize=4096)
def _cheapest(records: int, places: int, across: int, size: int, entries: int, slots: int, group: int) -> int:
    """The number of parts that should take the least time."""
    least, most = (-(-records // group), _PARTS) if group else (1, 4 * _WAVES // across)
    # seconds of a tile over all records, and of storing and adding up one more part
    tile, part = 2 * records * places * size / 5e12, (8 if group else 16) * entries / 4e12
    wanted = range(least, max(least, min(most, records)) + 1)
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
    if grams and flat.plain:  # inner products over channels want those beside each other; positions are few
        flat = _last(x, d, window)
    together = grams and x.dtype != torch.float32  # a bias adds up cotangents as they are, not as TF32 cuts them
    squares, share = _grams(flat, beta if together else 0.0) if grams else (_squares(flat), 0.0)
    if beta and not together:
        places = 2 if flat.plain else 1
        sums = torch.linalg.vector_norm(flat.d.sum(places, dtype=torch.float32), dim=1)
    x_size, d_size = x.numel() // len(x), d.numel() // len(d)
    found = fused_moments(flat.x if flat.plain else flat.x.permute(0, 3, 1, 2), flat.d, counts)
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


def plain_tiling(outs: int, channels: int, columns: int, places: int, single: bool) -> Tiling:
    """As :func:`tiling`, for plain tensors: where channels allow it a tile's columns are of one place of the kernel.

    ``single``: no float64 sum takes registers.
    """
    rows, cols = _power(outs, 128 if single else 64), 32 if channels % 64 and channels % 32 == 0 else 64
    return Tiling(rows, _power(columns, cols), 1, _power(places, 64), 8 if rows > 64 else 4, 2)


def _power(size: int, most: int) -> int:
    """The smallest power of two that is no less, from 16 to ``most``."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


class _Flat(NamedTuple):
    """Both factors as the kernels read them: with channels last, or plain."""

    x: Tensor  # (records, height, width, in); plain: (records, in, height, width)
    d: Tensor  # (records, positions, out); plain: (records, out, positions); contiguous
    wide: int  # positions in a row
    window: Window
    plain: bool = False

    @property
    def records(self) -> int:
        return self.d.shape[0]

    @property
    def places(self) -> int:
        return self.d.shape[2 if self.plain else 1]

    @property
    def outs(self) -> int:
        return self.d.shape[1 if self.plain else 2]

    @property
    def channels(self) -> int:
        return self.x.shape[1 if self.plain else 3]

    @property
    def columns(self) -> int:
        return self.channels * math.prod(self.window.kernel)

    def tiling(self, grouped: bool = False, squares: bool = False) -> Tiling:
        """How the product is cut into tiles."""
        if self.plain:
            return plain_tiling(self.outs, self.channels, self.columns, self.places, grouped or squares)
        return tiling(self.outs, self.columns, self.places, self.x.dtype, grouped)

    def one_tap(self, cols: int) -> bool:
        """Whether so many columns of a plain tensor are taken from one place of the kernel at a time."""
        return self.channels == self.columns or self.channels % cols == 0

    def tiles(self, how: Tiling) -> tuple[int, int]:
        """Tiles of the product, as rows and columns of them."""
        return -(-self.outs // how.rows), -(-self.columns // (how.cols * how.halves))

    def shape(self) -> list[int]:
        """What the kernels take as constants."""
        window, x, size = self.window, self.x, []
        if self.plain:
            size = [x.shape[2], x.shape[3]]
        return [self.channels, self.columns, self.places, *size, self.wide, window.kernel[1], *window.stride,
                *window.padding, *window.dilation, self.outs]  # fmt: skip

    def flags(self, cols: int) -> list[bool]:
        """Of the kernels for plain tensors: one tap at a time; positions of input and output are the same."""
        window, same = self.window, self.x.shape[2] * self.x.shape[3] == self.places
        unmoved = (window.kernel, window.stride, window.padding) == ((1, 1), (1, 1), (0, 0))
        return [self.one_tap(cols), unmoved and same]


def _flat(x: Tensor, d: Tensor, window: Window) -> _Flat:
    if x.dim() == 4:
        if x.dtype in PLANES and _turned(x, d, torch.contiguous_format) <= _turned(x, d, torch.channels_last):
            return _Flat(x.contiguous(), d.contiguous().view(*d.shape[:2], -1), d.shape[3], window, True)
        return _last(x, d, window)
    x, d = x.contiguous(), d.contiguous()
    return _Flat(x.unsqueeze(1), d, d.shape[1], window)


def _last(x: Tensor, d: Tensor, window: Window) -> _Flat:
    """With channels last, copied where they are not."""
    x, d = (t.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1) for t in (x, d))
    x, wide = x if x.is_contiguous() else x.contiguous(), d.shape[2]  # strides of sizes one are free
    return _Flat(x, d.reshape(d.shape[0], -1, d.shape[3]).contiguous(), wide, window)


def _turned(x: Tensor, d: Tensor, layout: torch.memory_format) -> int:
    """Numbers that would have to be copied for this layout, by the first record: a single one knows no batch stride."""
    return sum(0 if t[:1].is_contiguous(memory_format=layout) else t.numel() for t in (x, d))


def _launch(
    flat: _Flat, scale: Tensor | None, out: Tensor, share: int, parts: int, squares: bool, grouped: bool, how: Tiling
) -> None:  # fmt: skip
    x, d = flat.x, flat.d
    factor, how_many = x if scale is None else scale.contiguous(), (*flat.tiles(how), parts)
    kind = scale is not None, squares, grouped, x.dtype == torch.float32, not x.is_cuda
    if flat.plain:
        launch(
            _plane_kernels().planes, how_many,
            x, d, factor, out, flat.records, share, x.stride(0), d.stride(0), *flat.shape(), *kind,
            *flat.flags(how.cols), how.rows, how.cols, how.depth, num_warps=how.warps, num_stages=how.stages,
        )  # fmt: skip
        return
    launch(
        _kernels().tiles, how_many,
        x, d, factor, out, flat.records, share, x.shape[1], x.shape[2], *x.stride()[:3],
        d.stride(0), *flat.shape(), *kind, how.halves, how.rows, how.cols, how.depth, num_warps=how.warps,
        num_stages=how.stages,
    )  # fmt: skip


def _squares(flat: _Flat) -> Tensor:
    """Sums of squares of each record's product: (records, tiles)."""
    how = flat.tiling(squares=True)
    across = math.prod(flat.tiles(how))
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
def _plane_kernels() -> Any:
    return importlib.import_module("weightclip.factors.kernels._tiles_planes_triton")


@functools.cache
def _norm_kernels() -> Any:
    return importlib.import_module("weightclip.factors.kernels._products_triton")
