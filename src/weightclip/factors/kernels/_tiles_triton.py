# pyright: reportMissingImports=false
"""The kernels behind ``_tiles``: one record's product at a time on tensor cores; importing it needs Triton."""

# pyright: reportOperatorIssue=false
# in a kernel plain numbers stand for Triton's tensors, which its types do not know
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _patch(
    x, n, p, col, xn, xh, xw, height, width, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr,
    WIDE: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
):  # fmt: skip
    """Rows p (positions) and columns (tap, channel) of record n's patch matrix, zero where it has none."""
    tap = col // CHANNELS
    inside = (p < PLACES)[:, None] & (col < COLUMNS)[None, :]
    y = (p // WIDE * STRIDE_H - PAD_H)[:, None] + (tap // KERNEL_W * DIL_H)[None, :]
    z = (p % WIDE * STRIDE_W - PAD_W)[:, None] + (tap % KERNEL_W * DIL_W)[None, :]
    if COLUMNS > CHANNELS or PAD_H > 0 or PAD_W > 0:
        inside = inside & (y >= 0) & (y < height) & (z >= 0) & (z < width)
    return tl.load(x + n * xn + y * xh + z * xw + (col % CHANNELS)[None, :], mask=inside, other=0.0)


@triton.jit
def _operand(a, CUT: tl.constexpr, WIDEN: tl.constexpr):
    """What is multiplied: 16-bit numbers as they are; float32 cut (towards zero: no norm grows) to TF32's 10 bits."""
    if CUT:
        a = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    if WIDEN:  # the interpreter knows no products of bfloat16; the numbers are the same
        a = a.to(tl.float32)
    return a


@triton.jit
def _added(total, part, s, SCALED: tl.constexpr, GROUPED: tl.constexpr):
    """A record's scaled product added to the sum: in float64, or within a group of records in float32."""
    if SCALED:
        part = tl.where(s > 0, part * s, 0.0)
    if GROUPED:
        total += part
    else:
        total += part.to(tl.float64)
    return total


@triton.jit
def _of_tile(out, n):
    """The place of record n and this program's tile."""
    return out + (n * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def tiles(
    x, d, scale, out, records, share, height, width, xn, xh, xw, dn,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr, WIDE: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr,
    DIL_W: tl.constexpr, OUTS: tl.constexpr, SCALED: tl.constexpr, SQUARES: tl.constexpr, GROUPED: tl.constexpr,
    CUT: tl.constexpr, WIDEN: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """out[part, o, column] = sum over this part's records of scale * (float32 product over the record's positions).

    With SQUARES, out[record, tile] is the sum of squares of that record's product in this tile instead. A record's
    product begins with zero and ends with its last position: nothing of another record enters it. With HALVES = 2 a
    program has two tiles beside each other, and a record's positions fit into one step.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * (COLS * HALVES) + tl.arange(0, COLS)
    CHUNKS: tl.constexpr = (PLACES + DEPTH - 1) // DEPTH
    total = tl.zeros((ROWS, COLS), dtype=tl.float32 if GROUPED else tl.float64)
    part = tl.zeros((ROWS, COLS), dtype=tl.float32)
    if HALVES == 2:
        second = tl.zeros((ROWS, COLS), dtype=tl.float32 if GROUPED else tl.float64)
    first = tl.program_id(2) * share
    last = min(first + share, records)
    for t in range(first * CHUNKS, last * CHUNKS):
        n = tl.full((), t // CHUNKS, tl.int64)
        p = (t % CHUNKS) * DEPTH + tl.arange(0, DEPTH)
        here = (p < PLACES)[:, None] & (row < OUTS)[None, :]
        a = tl.load(d + n * dn + p[:, None] * OUTS + row[None, :], mask=here, other=0.0)
        b = _patch(x, n, p, col, xn, xh, xw, height, width, CHANNELS, COLUMNS, PLACES, WIDE, KERNEL_W, STRIDE_H,
                   STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W)  # fmt: skip
        if HALVES == 2:
            c = _patch(x, n, p, col + COLS, xn, xh, xw, height, width, CHANNELS, COLUMNS, PLACES, WIDE, KERNEL_W,
                       STRIDE_H, STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W)  # fmt: skip
        s = 1.0
        if SCALED:
            s = tl.load(scale + n)
        a = tl.trans(_operand(a, CUT, WIDEN))
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
            if HALVES == 2:
                other = tl.dot(a, _operand(c, CUT, WIDEN), input_precision="tf32")
                second = _added(second, other, s, SCALED, GROUPED)
    if not SQUARES:
        place = out + (tl.program_id(2).to(tl.int64) * OUTS + row)[:, None] * COLUMNS + col[None, :]
        tl.store(place, total, mask=(row < OUTS)[:, None] & (col < COLUMNS)[None, :])
        if HALVES == 2:
            tl.store(place + COLS, second, mask=(row < OUTS)[:, None] & (col + COLS < COLUMNS)[None, :])


@triton.jit
def grams(
    x, d, out, height, width, beta2, xn, xh, xw, dn,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr, WIDE: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr,
    DIL_W: tl.constexpr, OUTS: tl.constexpr, CUT: tl.constexpr, WIDEN: tl.constexpr, ALL: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """out[record] = sum over positions s, t of (u_s u_t + beta^2) (d_s d_t): the squared norm of its product and of
    beta times its bias."""
    n = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, ALL)
    left = tl.zeros((ALL, ALL), dtype=tl.float32)
    for k in range(0, COLUMNS, DEPTH):
        col = k + tl.arange(0, DEPTH)
        u = _patch(x, n, t, col, xn, xh, xw, height, width, CHANNELS, COLUMNS, PLACES, WIDE, KERNEL_W, STRIDE_H,
                   STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W)  # fmt: skip
        u = _operand(u, CUT, WIDEN)
        left += tl.dot(u, tl.trans(u), input_precision="tf32")
    right = tl.zeros((ALL, ALL), dtype=tl.float32)
    for k in range(0, OUTS, DEPTH):
        e = k + tl.arange(0, DEPTH)
        v = tl.load(
            d + n * dn + t[:, None] * OUTS + e[None, :], mask=(t < PLACES)[:, None] & (e < OUTS)[None, :], other=0.0
        )
        v = _operand(v, CUT, WIDEN)
        right += tl.dot(v, tl.trans(v), input_precision="tf32")
    tl.store(out + n, tl.sum(tl.sum((left + beta2) * right, 1), 0))
