"""Projection of inputs, cross-entropy and scales of noise on CUDA, each in one launch: small networks spend most of a
step launching."""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
from torch import Tensor

from weightclip.factors._limits import transforming
from weightclip.factors.kernels._products import launch, triton_found

_CLASSES = 1024  # more would need more rounding slack than losses allow for


def fits(x: Tensor) -> bool:
    """Whether the kernels can take ``x``: float32 records in one piece on CUDA, no derivative asked for, Triton."""
    if not (x.is_cuda and x.dtype == torch.float32 and x.is_contiguous()) or x.numel() == 0:
        return False
    return not (x.requires_grad and torch.is_grad_enabled()) and not transforming() and triton_found()


def fits_classes(z: Tensor, y: Tensor) -> bool:
    """The same for outputs (records x classes) with class indices."""
    return fits(z) and y.is_cuda and y.dtype == torch.int64 and y.is_contiguous() and 2 <= z.shape[1] <= _CLASSES


def project(x: Tensor, radius: float) -> Tensor:
    """Each record's projection on the ball of ``radius`` (infinite: none); zeros where it is not finite.

    Formal guarantees:
        Those of ``_entrance.project_records``; each record is a program of its own.
    """
    out, size = torch.empty_like(x), x.numel() // x.shape[0]
    launch(
        _kernels().projected, (x.shape[0], 1, 1),
        x, out, size, 0.0 if math.isinf(radius) else float(radius), not math.isinf(radius),
        1024 if size > 512 else 128, num_warps=4,
    )  # fmt: skip
    return out


def cross_entropy(
    z: Tensor, y: Tensor, ignored: int, temperature: float, outer: float, factor: float
) -> tuple[Tensor, Tensor]:
    """(outer CE(z/temperature), factor (softmax(z/temperature) - onehot)) of each record.

    Formal guarantees:
        Probabilities are e/sum(e) with at most 14 roundings of 2^-24 each, so that their sum is at most 1 + 14 2^-24,
        less than the slack in ``factor``. A record with a non-finite output, or a label that is no class or is
        ``ignored``, gets zeros; each record is a program of its own.
    """
    values, gradient = torch.empty(z.shape[0], device=z.device), torch.empty_like(z)
    block = 1 << (z.shape[1] - 1).bit_length()
    launch(
        _kernels().cross_entropy, (z.shape[0], 1, 1),
        z, y, values, gradient, z.shape[1], ignored, float(temperature), float(outer), float(factor), block,
        num_warps=1 if block <= 128 else 4,
    )  # fmt: skip
    return values, gradient


def scale_blocks_(values: Tensor, factors: Tensor, ends: Tensor) -> None:
    """Multiply the blocks of a flat float32 tensor, block k ending before ``ends[k]`` (int64), by float64 ``factors``.

    Formal guarantees:
        Each factor is rounded to float32, and each product once: what ``torch._foreach_mul_`` does by block.
    """
    size, blocks = values.numel(), len(ends)
    launch(
        _kernels().scaled, (-(-size // 1024), 1, 1),
        values, factors, ends, size, blocks, blocks.bit_length(), 1024, num_warps=4,
    )  # fmt: skip


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("weightclip.factors.kernels._one_launch_triton")
