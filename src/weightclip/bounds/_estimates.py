"""Estimates of operator norms. They converge from **below** and are never used for a guarantee."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from weightclip._torch import ConvNd
from weightclip.errors import CertificationError


def power_iteration_estimate(
    module_or_tensor: nn.Module | Tensor,
    iterations: int = 5,
    input_size: int | Sequence[int] | None = None,
    *,
    seed: int = 0,
) -> Tensor:
    """Estimate of the largest singular value by power iteration, as the paper computes ‖W‖₂.

    Each iteration applies the layer A and, through autograd, its transpose: x ← AᵀAx/‖AᵀAx‖. The estimate ‖Ax‖ at unit
    x is a *lower* bound of ‖A‖₂ at every iteration: weights clipped by it keep a norm above C. Use it to see how loose
    a certified bound is, never to certify (``operator_norm_bound`` does that).

    Args:
        module_or_tensor: a linear layer (its bias is removed), or a matrix.
        iterations: number of applications of AᵀA.
        input_size: spatial input size of a convolution.
        seed: seed of the random start; the global random state is not touched.

    Returns:
        0-dim tensor, the estimate.
    """
    if isinstance(module_or_tensor, Tensor):
        if module_or_tensor.dim() != 2:
            raise CertificationError(
                f"power iteration on a {module_or_tensor.dim()}-D tensor: pass a matrix or a layer"
            )
        matrix = module_or_tensor.detach()
        shape, like, module = (1, matrix.shape[1]), matrix, None
    else:
        module, matrix = module_or_tensor, None
        shape, like = _input_shape(module, input_size), cast(Tensor, module.weight)

    def apply(x: Tensor) -> Tensor:
        if matrix is not None:
            return x @ matrix.T
        assert module is not None
        return module(x) - module(torch.zeros_like(x))  # the linear part: without the bias

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(like.device, like.dtype)
    x = x / x.norm()
    for _ in range(iterations):
        with torch.enable_grad():
            x.requires_grad_(True)
            y = apply(x)
            (x,) = torch.autograd.grad(y, x, y.detach())
        norm = x.norm()
        x = (x / torch.where(norm > 0, norm, torch.ones_like(norm))).detach()
    with torch.no_grad():
        return apply(x).norm()


def _input_shape(module: nn.Module, input_size: int | Sequence[int] | None) -> tuple[int, ...]:
    if isinstance(module, nn.Linear):
        return (1, module.in_features)
    if not isinstance(module, ConvNd):
        raise CertificationError(f"power iteration on {type(module).__name__}: expected a Linear or Conv layer")
    if input_size is None:
        raise CertificationError(f"power iteration on {type(module).__name__}: pass input_size")
    axes = len(module.kernel_size)
    return (1, module.in_channels, *((input_size,) * axes if isinstance(input_size, int) else input_size))
