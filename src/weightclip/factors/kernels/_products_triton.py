# pyright: reportMissingImports=false
"""The kernel behind ``_products.weight_gradient``; importing it needs Triton, which comes with CUDA builds of torch."""

# pyright: reportOperatorIssue=false
# in a kernel plain numbers stand for Triton's tensors, which its types do not know
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def products(
    x, d, scale, out, channels, height, width, outs, HIGH: tl.constexpr, WIDE: tl.constexpr, total, share, columns,
    xn, xc, xh, xw, dn, dc, dh, dw,
    KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DIL_H: tl.constexpr, DIL_W: tl.constexpr, SCALED: tl.constexpr, CHANNELS_LAST: tl.constexpr, BIAS: tl.constexpr,
    SQUARES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[part, o, (tap, c)] = sum over this part's (record, position) of d[record, o, position] x[record, c, window].

    With BIAS, a last column holds the sums of d itself; with SQUARES, out[part, tile] holds the sum of the squares of a
    tile instead of the tile. Memory is read along its fastest dimension: positions, or channels where CHANNELS_LAST.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    c = col % channels
    top = (col // channels // KERNEL_W) * DIL_H - PAD_H
    left = (col // channels % KERNEL_W) * DIL_W - PAD_W
    acc = tl.zeros((ROWS, COLS), dtype=tl.float64)
    plain = tl.zeros((ROWS, DEPTH), dtype=tl.float64)
    first = tl.program_id(2) * share
    end = min(first + share, total)
    for start in range(first, end, DEPTH):
        k = start + tl.arange(0, DEPTH)
        n = k // (HIGH * WIDE)
        i = k % (HIGH * WIDE) // WIDE
        j = k % WIDE
        here = k < end
        record = n.to(tl.int64)
        if SCALED:
            s = tl.load(scale + n, mask=here, other=0.0).to(tl.float32)
        if CHANNELS_LAST:
            at = d + (record * dn + i * dh + j * dw)[:, None] + row[None, :] * dc
            a = tl.trans(tl.load(at, mask=here[:, None] & (row < outs)[None, :], other=0.0).to(tl.float32))
            y = i[:, None] * STRIDE_H + top[None, :]
            z = j[:, None] * STRIDE_W + left[None, :]
            inside = here[:, None] & (col < columns)[None, :] & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            b = tl.load(x + (record * xn)[:, None] + c[None, :] * xc + y * xh + z * xw, mask=inside, other=0.0)
            if SCALED:
                b = tl.where(s[:, None] > 0, b.to(tl.float32), 0.0)
        else:
            at = d + (record * dn + i * dh + j * dw)[None, :] + row[:, None] * dc
            a = tl.load(at, mask=here[None, :] & (row < outs)[:, None], other=0.0).to(tl.float32)
            y = i[None, :] * STRIDE_H + top[:, None]
            z = j[None, :] * STRIDE_W + left[:, None]
            inside = here[None, :] & (col < columns)[:, None] & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            b = tl.load(x + (record * xn)[None, :] + c[:, None] * xc + y * xh + z * xw, mask=inside, other=0.0)
            if SCALED:
                b = tl.where(s[None, :] > 0, b.to(tl.float32), 0.0)
            b = tl.trans(b)
        if SCALED:
            a = tl.where(s[None, :] > 0, a, 0.0) * s[None, :]
        if BIAS:  # in every column tile: a branch in this loop would cost more
            plain += a.to(tl.float64)
        acc = tl.dot(a.to(tl.float64), b.to(tl.float64), acc, out_dtype=tl.float64)
    if SQUARES:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tiles = tl.num_programs(0) * tl.num_programs(1)
        tl.store(out + tl.program_id(2).to(tl.int64) * tiles + tile, tl.sum(tl.sum(acc * acc, 1), 0))
    else:
        across = columns + 1 if BIAS else columns
        place = out + (tl.program_id(2).to(tl.int64) * outs + row) * across
        tl.store(place[:, None] + col[None, :], acc, mask=(row < outs)[:, None] & (col < columns)[None, :])
        if BIAS:
            whose = tl.where(tl.program_id(1) == 0, outs, 0)
            tl.store(place + columns, tl.sum(plain, 1), mask=row < whose)


@triton.jit
def sums(
    x, d, scale, out, channels, POSITIONS: tl.constexpr, total, share, xn, xc, xp, dn, dc, dp,
    SCALED: tl.constexpr, PRODUCT: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[part, 0, c] = sum over this part's (record, position) of d; out[part, 1, c] = that of d x if PRODUCT."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    plain = tl.zeros((CHANNELS, DEPTH), dtype=tl.float64)
    product = tl.zeros((CHANNELS, DEPTH), dtype=tl.float64)
    first = tl.program_id(1) * share
    for start in range(first, min(first + share, total), DEPTH):
        k = start + tl.arange(0, DEPTH)
        n = k // POSITIONS
        position = k % POSITIONS
        record = n.to(tl.int64)
        inside = (c < channels)[:, None] & (k < total)[None, :]
        at = d + (record * dn + position * dp)[None, :] + c[:, None] * dc
        a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:  # in float32, as in `products`: which kernel sums a bias depends on the size of the batch
            s = tl.load(scale + n, mask=k < total, other=0.0).to(tl.float32)[None, :]
            a = tl.where(s > 0, a, 0.0) * s
        a = a.to(tl.float64)
        plain += a
        if PRODUCT:
            at = x + (record * xn + position * xp)[None, :] + c[:, None] * xc
            b = tl.load(at, mask=inside, other=0.0).to(tl.float64)
            if SCALED:
                b = tl.where(s > 0, b, 0.0)
            product += a * b
    rows = 2 if PRODUCT else 1
    place = out + tl.program_id(1).to(tl.int64) * rows * channels + c
    tl.store(place, tl.sum(plain, 1), mask=c < channels)
    if PRODUCT:
        tl.store(place + channels, tl.sum(product, 1), mask=c < channels)


@triton.jit
def record_totals(
    x, d, scale, out, channels, positions, xn, xc, xp, dn, dc, dp, SCALED: tl.constexpr, PRODUCT: tl.constexpr,
    SINGLE: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One record's part of ``sums``: out[record, 0, c] = sum over positions of d, out[record, 1, c] = that of d x.

    With SINGLE additions are float32, and the sum is scaled in place of what is added.
    """
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    plain = tl.zeros((DEPTH, CHANNELS), dtype=tl.float32 if SINGLE else tl.float64)
    product = tl.zeros((DEPTH, CHANNELS), dtype=tl.float64)
    s = 1.0
    if SCALED:
        s = tl.load(scale + n).to(tl.float32)
    for start in range(0, positions, DEPTH):
        p = start + tl.arange(0, DEPTH)
        inside = (p < positions)[:, None] & (c < channels)[None, :]
        a = tl.load(d + n * dn + p[:, None] * dp + c[None, :] * dc, mask=inside, other=0.0).to(tl.float32)
        if not SINGLE:
            if SCALED:  # in float32, as in `products` and `sums`: which of them sums depends on the size of the batch
                a = tl.where(s > 0, a, 0.0) * s
            a = a.to(tl.float64)
        plain += a
        if PRODUCT:
            b = tl.load(x + n * xn + p[:, None] * xp + c[None, :] * xc, mask=inside, other=0.0).to(tl.float64)
            if SCALED:
                b = tl.where(s > 0, b, 0.0)
            product += a * b
    rows = 2 if PRODUCT else 1
    place = out + n * rows * channels + c
    whole = tl.sum(plain, 0)
    if SINGLE and SCALED:
        whole = tl.where(s > 0, whole * s, 0.0)
    tl.store(place, whole, mask=c < channels)
    if PRODUCT:
        tl.store(place + channels, tl.sum(product, 0), mask=c < channels)


@triton.jit
def over_records(
    totals, scale, out, records, size, SCALED: tl.constexpr, ENTRIES: tl.constexpr, RECORDS: tl.constexpr
):  # fmt: skip
    """out[e] = sum over records of scale[record] totals[record, e], scaled in the type of totals."""
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    acc = tl.zeros((RECORDS, ENTRIES), dtype=tl.float64)
    for start in range(0, records, RECORDS):
        n = start + tl.arange(0, RECORDS)
        here = (n < records)[:, None] & (e < size)[None, :]
        value = tl.load(totals + n.to(tl.int64)[:, None] * size + e[None, :], mask=here, other=0.0)
        if SCALED:
            s = tl.load(scale + n, mask=n < records, other=0.0).to(tl.float32)[:, None]
            value = tl.where(s > 0, value * s, 0.0)
        acc += value.to(tl.float64)
    tl.store(out + e, tl.sum(acc, 0), mask=e < size)


@triton.jit
def scales(
    x, d, counts, limits, out, x_size, d_size, x_step, d_step, places, tiny_x, tiny_d, bias,
    WEIGHTED: tl.constexpr, CHANNELS: tl.constexpr, FLAGS: tl.constexpr, FLOOR: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One record a program: the norms of its two factors, and its scale (``_limits.record_scale``), or with FLAGS = 8
    the product of the norms, infinite where it is not finite.
    """
    n = tl.program_id(0).to(tl.int64)
    x2, d2 = _energies(x, d, counts, n, x_size, d_size, x_step, d_step, places, WEIGHTED, CHANNELS, BLOCK)
    x_norm, d_norm = tl.sqrt_rn(x2 + tiny_x + bias), tl.sqrt_rn(d2 + tiny_d)
    tl.store(out + n, _limited(x_norm, d_norm, limits, FLAGS, FLOOR, SMALLEST))


@triton.jit
def _limited(x_norm, d_norm, limits, FLAGS: tl.constexpr, FLOOR: tl.constexpr, SMALLEST: tl.constexpr):
    """A record's scale from the norms of its factors, or with FLAGS = 8 their product."""
    if FLAGS == 8:
        product = x_norm * d_norm
        result = tl.where(product < float("inf"), product, float("inf"))
    else:
        scale = x_norm * 0.0 + 1.0
        if FLAGS & 1:
            scale = scale * tl.minimum(tl.div_rn(tl.load(limits), tl.maximum(x_norm, FLOOR)), 1.0)
        if FLAGS & 2:
            scale = scale * tl.minimum(tl.div_rn(tl.load(limits + 1), tl.maximum(d_norm, FLOOR)), 1.0)
        if FLAGS & 4:
            product = scale * x_norm * d_norm
            scale = scale * tl.minimum(tl.div_rn(tl.load(limits + 2), tl.maximum(product, FLOOR)), 1.0)
        good = (x_norm < float("inf")) & (d_norm < float("inf")) & (scale < float("inf")) & (scale >= SMALLEST)
        result = tl.where(good, scale, 0.0)
    return result


@triton.jit
def _energies(
    x, d, counts, n, x_size, d_size, x_step, d_step, places, WEIGHTED: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of squares of one record's inputs and cotangents, or of this program's blocks of them.

    CHANNELS is the number of channels where they lie last, 0 where positions do; ``counts`` weighs positions.
    """
    x2 = tl.zeros((BLOCK,), dtype=tl.float32)
    d2 = tl.zeros((BLOCK,), dtype=tl.float32)
    step = BLOCK * tl.num_programs(1)
    for start in range(tl.program_id(1) * BLOCK, max(x_size, d_size), step):  # both at once: loads wait together
        e = start + tl.arange(0, BLOCK)
        a = tl.load(x + n * x_step + e, mask=e < x_size, other=0.0).to(tl.float32)
        b = tl.load(d + n * d_step + e, mask=e < d_size, other=0.0).to(tl.float32)
        square = a * a
        if WEIGHTED:
            place = e // CHANNELS if CHANNELS > 0 else e % places
            square = square * tl.load(counts + place, mask=e < x_size, other=0.0)
        x2 += square
        d2 += b * b
    return tl.sum(x2, 0), tl.sum(d2, 0)


@triton.jit
def moments(
    x, d, counts, out, x_size, d_size, x_step, d_step, places, WEIGHTED: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[record, program]: sums of squares of the record's inputs and of its cotangents, as far as a program goes."""
    n = tl.program_id(0).to(tl.int64)
    x2, d2 = _energies(x, d, counts, n, x_size, d_size, x_step, d_step, places, WEIGHTED, CHANNELS, BLOCK)
    place = out + 2 * (n * tl.num_programs(1) + tl.program_id(1))
    tl.store(place, x2)
    tl.store(place + 1, d2)


@triton.jit
def moments_and_totals(
    x, d, out, totals, x_size, positions, channels, x_step, d_step, CHANNELS: tl.constexpr, DEPTH: tl.constexpr
):
    """``moments``, with totals[record, c] = sum over positions of d in float32; a program has a block of channels.

    Channels lie last. What is added, and in which order, follows from the shape of one record.
    """
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    step = CHANNELS * DEPTH * tl.num_programs(1)
    x2 = tl.zeros((CHANNELS * DEPTH,), dtype=tl.float32)
    d2 = tl.zeros((DEPTH, CHANNELS), dtype=tl.float32)
    plain = tl.zeros((DEPTH, CHANNELS), dtype=tl.float32)
    for i in range(0, max(tl.cdiv(x_size, step), tl.cdiv(positions, DEPTH))):  # both at once: loads wait together
        e = i * step + tl.program_id(1) * (CHANNELS * DEPTH) + tl.arange(0, CHANNELS * DEPTH)
        p = i * DEPTH + tl.arange(0, DEPTH)
        b = tl.load(x + n * x_step + e, mask=e < x_size, other=0.0).to(tl.float32)
        inside = (p < positions)[:, None] & (c < channels)[None, :]
        a = tl.load(d + n * d_step + p[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        x2 += b * b
        d2 += a * a
        plain += a
    place = out + 2 * (n * tl.num_programs(1) + tl.program_id(1))
    tl.store(place, tl.sum(x2, 0))
    tl.store(place + 1, tl.sum(tl.sum(d2, 1), 0))
    tl.store(totals + n * channels + c, tl.sum(plain, 0), mask=c < channels)


@triton.jit
def _whole(found, n, SPLITS: tl.constexpr):
    """A record's two sums of squares from those of the programs that shared it."""
    k = 2 * (n * SPLITS + tl.arange(0, SPLITS))
    return tl.sum(tl.load(found + k), 0), tl.sum(tl.load(found + k + 1), 0)


@triton.jit
def finish_scales(
    found, limits, out, tiny_x, tiny_d, bias, FLAGS: tl.constexpr, FLOOR: tl.constexpr, SMALLEST: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """As ``scales``, from the sums of squares that ``moments`` found."""
    n = tl.program_id(0).to(tl.int64)
    x2, d2 = _whole(found, n, SPLITS)
    x_norm, d_norm = tl.sqrt_rn(x2 + tiny_x + bias), tl.sqrt_rn(d2 + tiny_d)
    tl.store(out + n, _limited(x_norm, d_norm, limits, FLAGS, FLOOR, SMALLEST))


@triton.jit
def finish_exact(
    found, squares, sums, out, tiny_x, tiny_d, bias, beta2, share, rounding, least, tiles,
    SUMS: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Norm of each record's product from its squares by tile, and what rounding may hide; infinite if not finite.

    ``share`` of the squared product of the factors' norms is what squares may be off (grams cancel), ``rounding`` of
    that product what the sum that is formed may be, ``least`` of it what counts in any case. With SUMS, beta2 times the
    squares of ``sums`` belong to the bias.
    """
    n = tl.program_id(0).to(tl.int64)
    x2, d2 = _whole(found, n, SPLITS)
    x2 = x2.to(tl.float64) + tiny_x + bias
    d2 = d2.to(tl.float64) + tiny_d
    total = tl.zeros((TILES,), dtype=tl.float64)
    for start in range(0, tiles, TILES):
        e = start + tl.arange(0, TILES)
        total += tl.load(squares + n * tiles + e, mask=e < tiles, other=0.0).to(tl.float64)
    square = tl.sum(total, 0)
    if SUMS:
        plain = tl.load(sums + n).to(tl.float64)
        square += beta2 * plain * plain
    square = tl.where(tl.abs(square) < float("inf"), square, float("inf"))  # NaN as well
    free = x2 * d2
    hidden = tiny_x * d2 + tiny_d * x2  # products of tiny numbers vanish in float32
    square = tl.where(square > 0, square, 0.0) * (1 + 2.0**-15) + share * free + hidden
    norm = tl.maximum(tl.sqrt(square) + rounding * tl.sqrt(free), least * tl.sqrt(free))
    norm = norm.to(tl.float32) * (1 + 2.0**-22)
    tl.store(out + n, tl.where(norm < float("inf"), norm, float("inf")))


@triton.jit
def channels(
    x, d, out, totals, count, places, xn, xc, xp, dn, dc, dp, EXACT: tl.constexpr, TOTALS: tl.constexpr,
    CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[record, :, block of channels]: what the norms of a gain and an offset per channel are made of.

    With EXACT the squares of (sum over positions of d x), of (sum of d), and the sums of |d x| and |d|; otherwise the
    largest channel's squares of x, and the squares of d. With TOTALS also totals[record, 0, c] = sum of d and
    totals[record, 1, c] = sum of d x.
    """
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.zeros((CHANNELS, DEPTH), dtype=tl.float64)
    second = tl.zeros((CHANNELS, DEPTH), dtype=tl.float64)
    third = tl.zeros((CHANNELS, DEPTH), dtype=tl.float64)
    fourth = tl.zeros((CHANNELS, DEPTH), dtype=tl.float64)
    for start in range(0, places, DEPTH):
        p = start + tl.arange(0, DEPTH)
        inside = (c < count)[:, None] & (p < places)[None, :]
        b = tl.load(x + n * xn + c[:, None] * xc + p[None, :] * xp, mask=inside, other=0.0).to(tl.float64)
        a = tl.load(d + n * dn + c[:, None] * dc + p[None, :] * dp, mask=inside, other=0.0).to(tl.float64)
        if EXACT:
            first += a * b
            second += a
            third += tl.abs(a * b)
            fourth += tl.abs(a)
        else:
            first += b * b
            second += a * a
            if TOTALS:
                third += a * b
                fourth += a
    if TOTALS:
        whole = totals + n * 2 * count + c
        tl.store(whole, tl.sum(second if EXACT else fourth, 1), mask=c < count)
        tl.store(whole + count, tl.sum(first if EXACT else third, 1), mask=c < count)
    blocks = tl.num_programs(1)
    place = out + n * 4 * blocks + tl.program_id(1)
    gains = tl.sum(first, 1)
    if EXACT:
        offsets = tl.sum(second, 1)
        tl.store(place, tl.sum(gains * gains, 0))
        tl.store(place + blocks, tl.sum(offsets * offsets, 0))
        tl.store(place + 2 * blocks, tl.sum(tl.sum(third, 1), 0))
        tl.store(place + 3 * blocks, tl.sum(tl.sum(fourth, 1), 0))
    else:
        bad = tl.sum(tl.where(gains < float("inf"), 0, 1), 0) > 0  # a maximum would pass over NaN
        tl.store(place, tl.where(bad, float("inf"), tl.max(gains, 0)))
        tl.store(place + blocks, tl.sum(tl.sum(second, 1), 0))


@triton.jit
def finish_channels(
    found, limits, out, blocks, beta, shared, tiny_x, tiny_d, rounding,
    EXACT: tl.constexpr, FLAGS: tl.constexpr, FLOOR: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A record's scale from what ``channels`` found, or with EXACT the norm of its gradient."""
    n = tl.program_id(0).to(tl.int64)
    q = tl.arange(0, BLOCK)
    place = found + n * 4 * blocks + q
    first = tl.load(place, mask=q < blocks, other=0.0)
    second = tl.sum(tl.load(place + blocks, mask=q < blocks, other=0.0), 0)
    if EXACT:
        third = tl.sum(tl.load(place + 2 * blocks, mask=q < blocks, other=0.0), 0)
        fourth = tl.sum(tl.load(place + 3 * blocks, mask=q < blocks, other=0.0), 0)
        norm = tl.sqrt(tl.sum(first, 0) + beta * beta * second) + rounding * (third + beta * fourth)
        norm = norm.to(tl.float32) * (1 + 2.0**-22)
        tl.store(out + n, tl.where(norm < float("inf"), norm, float("inf")))
    else:
        x_norm = tl.sqrt(tl.max(first, 0) + (beta * beta * shared + tiny_x)).to(tl.float32)
        d_norm = tl.sqrt(second + tiny_d).to(tl.float32)
        tl.store(out + n, _limited(x_norm, d_norm, limits, FLAGS, FLOOR, SMALLEST))
