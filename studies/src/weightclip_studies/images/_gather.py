"""A batch's rows, read once: as bfloat16 for the forward pass, and turned (width x rows) for the integer product."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor


def gather(codes: Tensor, rows: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``codes[rows]`` in ``dtype``, and a (rows x width) int8 view whose memory runs along the rows.

    On a CPU both are the int8 rows, in the memory of ``into`` if it is given. On CUDA one Triton kernel does both when
    Triton is there; the result is the same as the plain one's, bit by bit.
    """
    kernel = _checked_kernel() if codes.is_cuda and dtype is torch.bfloat16 else None
    if kernel is not None:
        return _launch(kernel, codes, rows)
    if not codes.is_cuda:
        room = into[: len(rows)] if into is not None and len(rows) <= len(into) else None
        x = torch.index_select(codes, 0, rows, out=room)
        return x, x
    x = codes.index_select(0, rows)
    return x.to(dtype), x.t().contiguous().t()


def _launch(kernel: Any, codes: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    count, width = len(rows), codes.shape[1]
    half = torch.empty(count, width, dtype=torch.bfloat16, device=codes.device)
    turned = torch.empty(width, count, dtype=torch.int8, device=codes.device)
    kernel[(-(-count // 128), -(-width // 64))](codes, rows, half, turned, count, width, 128, 64)
    return half, turned.t()


@functools.cache
def _checked_kernel() -> Any:
    """The kernel, after it agreed with the plain gather on a small case; None where there is no Triton."""
    try:
        kernel = _build()
        codes = torch.randint(-127, 128, (300, 112), dtype=torch.int8, device="cuda")
        rows = torch.randint(0, 300, (208,), device="cuda")
        half, turned = _launch(kernel, codes, rows)
        good = torch.equal(half, codes[rows].bfloat16()) and torch.equal(turned, codes[rows])
    except Exception as error:  # whatever fails here, the plain path is right
        warnings.warn(f"no fused gather, the plain one is used: {type(error).__name__}: {error}", stacklevel=3)
        return None
    return kernel if good else None


def _build() -> Any:
    import triton  # pyright: ignore[reportMissingImports]

    from weightclip_studies.images._triton_gather import gather_kernel

    return triton.jit(gather_kernel)
