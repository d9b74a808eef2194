# pyright: reportMissingImports=false
"""Kernels behind ``_one_launch``; importing them needs Triton."""

# pyright: reportOperatorIssue=false
# in a kernel plain numbers stand for Triton's tensors, which its types do not know
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def projected(x, out, size, radius, BOUNDED: tl.constexpr, BLOCK: tl.constexpr):
    """out = x min(1, radius/||x||), the norm in float64; zeros where the norm is not finite."""
    place = tl.program_id(0).to(tl.int64) * size
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, size, BLOCK):
        e = start + tl.arange(0, BLOCK)
        value = tl.load(x + place + e, mask=e < size, other=0.0).to(tl.float64)
        total += value * value
    norm = tl.sqrt(tl.sum(total, 0))
    good = norm < float("inf")
    if BOUNDED:  # in two steps: the scale of a huge record may be subnormal, and would round up to twice its value
        scale = tl.minimum(radius / tl.maximum(norm, 1e-300), 1.0)
        first = tl.maximum(scale, 2.0**-100).to(tl.float32)
        second = tl.minimum(scale * 2.0**100, 1.0).to(tl.float32)
    for start in range(0, size, BLOCK):
        e = start + tl.arange(0, BLOCK)
        value = tl.load(x + place + e, mask=e < size, other=0.0)
        if BOUNDED:
            value = (value * first) * second
        tl.store(out + place + e, tl.where(good, value, 0.0), mask=e < size)


@triton.jit
def cross_entropy(z, y, values, gradient, classes, ignored, temperature, outer, factor, BLOCK: tl.constexpr):
    """Loss and gradient of one record; zeros where an output is not finite or the label is no class."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    here = c < classes
    v = tl.div_rn(tl.load(z + n * classes + c, mask=here, other=float("-inf")), temperature)
    label = tl.load(y + n)
    finite = tl.sum(tl.where(here & ~(tl.abs(v) < float("inf")), 1, 0), 0) == 0
    counts = (label >= 0) & (label < classes) & (label != ignored) & finite
    top = tl.max(tl.where(here & counts, v, float("-inf")), 0)
    powers = tl.where(here & counts, tl.exp(v - top), 0.0)
    total = tl.sum(powers, 0)
    own = tl.sum(tl.where(c == label, v, 0.0), 0)
    value = tl.where(counts, (tl.log(total) + (top - own)) * outer, 0.0)
    slope = (tl.div_rn(powers, total) - tl.where(c == label, 1.0, 0.0)) * factor
    tl.store(values + n, value)
    tl.store(gradient + n * classes + c, tl.where(counts, slope, 0.0), mask=here)


@triton.jit
def scaled(values, factors, ends, size, blocks, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """values[e] *= factors[k], k the block that entry e lies in: the number of ends at or before it."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), dtype=tl.int32)
    high = low + blocks
    for _ in range(STEPS):
        middle = (low + high) // 2
        beyond = (tl.load(ends + middle, mask=middle < blocks, other=size) <= e) & (low < high)
        low = tl.where(beyond, middle + 1, low)
        high = tl.where(beyond, high, middle)
    here = e < size
    factor = tl.load(factors + low, mask=here, other=0.0).to(tl.float32)
    tl.store(values + e, tl.load(values + e, mask=here, other=0.0) * factor, mask=here)
