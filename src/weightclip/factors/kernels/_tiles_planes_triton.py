# pyright: reportMissingImports=false
"""As ``_tiles_triton``, for plain tensors (every channel a plane, positions beside each other) as they lie in memory.

TF32 products want their operands with positions beside each other, which plain tensors have: nothing is copied or
turned over. Arithmetic, order and rounding are those of ``_tiles_triton``, from which cutting and adding come.
"""

# pyright: reportOperatorIssue=false
# in a kernel plain numbers stand for Triton's tensors, which its types do not know
from __future__ import annotations

import triton
import triton.language as tl

from weightclip.factors.kernels._tiles_triton import _added, _of_tile, _operand


@triton.jit
def _cotangents(d, p, row, PLACES: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """(ROWS, DEPTH): channels ``row`` at positions p of the record that ``d`` points to, zero where it has none."""
    place = d + (row[:, None] * PLACES + p[None, :])
    if PLACES % DEPTH == 0 and OUTS % ROWS == 0:
        found = tl.load(place)
    else:
        found = tl.load(place, mask=(row < OUTS)[:, None] & (p < PLACES)[None, :], other=0.0)
    return found


@triton.jit
def _taken(
    x, p, tap, channel, inside, PLACES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DIL_H: tl.constexpr, DIL_W: tl.constexpr, ONE_TAP: tl.constexpr, AS_IS: tl.constexpr, FULL: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """(DEPTH, columns): positions p of the patch matrix of the record that ``x`` points to, zero where it has none.

    ``tap`` is one number if ONE_TAP, otherwise one for each column, as ``channel`` is. AS_IS: positions of input and
    output are the same. FULL: no column is outside.
    """
    plane = channel * (HEIGHT * WIDTH)
    if AS_IS:
        place = x + (plane[None, :] + p[:, None])
        if FULL and PLACES % DEPTH == 0:
            found = tl.load(place)
        else:
            found = tl.load(place, mask=inside[None, :] & (p < PLACES)[:, None], other=0.0)
    else:
        high, wide = tap // KERNEL_W * DIL_H - PAD_H, tap % KERNEL_W * DIL_W - PAD_W
        down, right = p // WIDE * STRIDE_H, p % WIDE * STRIDE_W
        if ONE_TAP:  # which positions lie inside is the same for all columns: nothing is compared for each element
            y, z = down + high, right + wide
            here = ((y >= 0) & (y < HEIGHT) & (z >= 0) & (z < WIDTH) & (p < PLACES))[:, None]
            place = (x + (y * WIDTH + z)[:, None]) + plane.to(tl.int64)[None, :]
        else:
            y, z = down[:, None] + high[None, :], right[:, None] + wide[None, :]
            here = (y >= 0) & (y < HEIGHT) & (z >= 0) & (z < WIDTH) & (p < PLACES)[:, None]
            place = x + ((plane + high * WIDTH + wide)[None, :] + (down * WIDTH + right)[:, None])
        if not FULL:
            here = here & inside[None, :]
        found = tl.load(place, mask=here, other=0.0)
    return found


@triton.jit
def planes(
    x, d, scale, out, records, share, xn, dn,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr, OUTS: tl.constexpr, SCALED: tl.constexpr,
    SQUARES: tl.constexpr, GROUPED: tl.constexpr, CUT: tl.constexpr, WIDEN: tl.constexpr, ONE_TAP: tl.constexpr,
    AS_IS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[part, o, column] = sum over this part's records of scale * (float32 product over the record's positions).

    With SQUARES, out[record, tile] is the sum of squares of that record's product in this tile instead. A record's
    product begins with zero and ends with its last position: nothing of another record enters it. With ONE_TAP all
    columns of a program are channels of one place of the kernel. ``ahead`` holds the patches of the next step, read
    into registers while this one is multiplied: Triton's own pipeline would lay them out in the other order, and
    all threads of a warp would wait for one bank of shared memory.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if ONE_TAP:
        ACROSS: tl.constexpr = (CHANNELS + COLS - 1) // COLS
        tap = tl.program_id(1) // ACROSS
        channel = tl.program_id(1) % ACROSS * COLS + tl.arange(0, COLS)
        inside = channel < CHANNELS
        col = tap * CHANNELS + channel
    else:
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        tap = col // CHANNELS
        channel = col % CHANNELS
        inside = col < COLUMNS
    FULL: tl.constexpr = (CHANNELS if ONE_TAP else COLUMNS) % COLS == 0
    CHUNKS: tl.constexpr = (PLACES + DEPTH - 1) // DEPTH
    total = tl.zeros((ROWS, COLS), dtype=tl.float32 if GROUPED else tl.float64)
    part = tl.zeros((ROWS, COLS), dtype=tl.float32)
    first = tl.program_id(2) * share
    last = min(first + share, records)
    ahead = _taken(x + first.to(tl.int64) * xn, tl.arange(0, DEPTH), tap, channel, inside, PLACES, HEIGHT, WIDTH, WIDE,
                   KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W, ONE_TAP, AS_IS, FULL, DEPTH)  # fmt: skip
    for t in range(first * CHUNKS, last * CHUNKS):
        n = tl.full((), t // CHUNKS, tl.int64)
        p = (t % CHUNKS) * DEPTH + tl.arange(0, DEPTH)
        a = _cotangents(d + n * dn, p, row, PLACES, OUTS, ROWS, DEPTH)
        b = ahead
        after = min(t + 1, last * CHUNKS - 1)
        p = (after % CHUNKS) * DEPTH + tl.arange(0, DEPTH)
        ahead = _taken(x + tl.full((), after // CHUNKS, tl.int64) * xn, p, tap, channel, inside, PLACES, HEIGHT, WIDTH,
                       WIDE, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W, ONE_TAP, AS_IS, FULL,
                       DEPTH)  # fmt: skip
        s = 1.0
        if SCALED:
            s = tl.load(scale + n)
        a = _operand(a, CUT, WIDEN)
        b = _operand(b, CUT, WIDEN)
        if CHUNKS > 1:
            part = tl.dot(a, b, part, input_precision="tf32")
            if t % CHUNKS == CHUNKS - 1:  # the record is complete
                if SQUARES:
                    tl.store(_of_tile(out, n), tl.sum(tl.sum(part * part, 1), 0))
                else:
                    total = _added(total, part, s, SCALED, GROUPED)
                part = tl.zeros((ROWS, COLS), dtype=tl.float32)
        else:
            whole = tl.dot(a, b, input_precision="tf32")
            if SQUARES:
                tl.store(_of_tile(out, n), tl.sum(tl.sum(whole * whole, 1), 0))
            else:
                total = _added(total, whole, s, SCALED, GROUPED)
    if not SQUARES:
        place = out + (tl.program_id(2).to(tl.int64) * OUTS + row)[:, None] * COLUMNS + col[None, :]
        tl.store(place, total, mask=(row < OUTS)[:, None] & inside[None, :])
