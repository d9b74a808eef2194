"""Certified norms of all layers of a model at once: one Gram matrix per layer, then batched work on the small ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from weightclip.bounds import kernel_overlap
from weightclip.bounds._operator_norms import gram_iteration, spectral_norm

_BLOCK = 1024  # terms a float32 product may add up before its result goes into a float64 sum
_LARGE = 1 << 21  # multiply-adds beyond which a CPU Gram matrix is formed in float32 blocks
_TOGETHER = 1 << 30  # multiply-adds of one product of a batch, below which matrices of all sizes share it
_ITERATIONS = 9  # excess of the Gram iteration: below n^(1/2^(J+2)), 0.3% at n = 256


class NormBank:
    """sqrt(m) ||R||_2 of every Linear and Conv layer, R the weight as a matrix and m the kernel overlap.

    Formal guarantees:
        Every number returned is an upper bound of the layer's l2 operator norm at the present weights (cast to
        ``dtype``), the rounding of this computation included; only weights are read. Nothing waits for the device.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = dict(layers)
        self.factors = {}
        for path, module in self.layers.items():
            conv = isinstance(module, _ConvNd)
            self.factors[path] = math.sqrt(kernel_overlap(module)) if conv else 1.0

    def norms(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Bounds by path, 0-dim float64."""
        grams: dict[int, list[tuple[str, Tensor, Tensor]]] = {}
        found: dict[str, Tensor] = {}
        for path, module in self.layers.items():
            matrix = _matrix(module, dtype)
            if matrix.device.type == "cpu" and matrix.dim() == 2 and matrix.numel() * min(matrix.shape) < _LARGE:
                found[path] = spectral_norm(matrix) * self.factors[path]
                continue
            gram, error = _gram(matrix)
            for part in gram if gram.dim() == 3 else gram[None]:
                grams.setdefault(_bucket(part.shape[-1]), []).append((path, part, error))
        for size, entries in _merged(grams).items():
            bounds = _largest_eigenvalue([g for _, g, _ in entries], size)
            for i, (path, _, error) in enumerate(entries):
                norm = (bounds[i] + error).clamp(min=0).sqrt() * (self.factors[path] * (1 + 1e-12))
                found[path] = torch.maximum(found[path], norm) if path in found else norm
        return {path: found[path] for path in self.layers}


def _matrix(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight as (rows, columns), or (groups, rows, columns) for a grouped convolution."""
    weight = cast(Tensor, module.weight).detach()
    weight = weight if weight.dtype == dtype or dtype == torch.float32 else weight.to(dtype).to(weight.dtype)
    if not isinstance(module, _ConvNd):
        return weight
    if isinstance(module, _ConvTransposeNd) or module.groups > 1:
        return weight.reshape(module.groups, weight.shape[0] // module.groups, -1)
    return weight.flatten(1)


def _bucket(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


def _merged(grams: dict[int, list[tuple[str, Tensor, Tensor]]]) -> dict[int, list[tuple[str, Tensor, Tensor]]]:
    """On a device, all matrices as one batch of the largest size where that is little work: fewer launches."""
    entries = [entry for group in grams.values() for entry in group]
    size = max(grams, default=0)
    if not entries or entries[0][1].device.type == "cpu" or len(entries) * size**3 > _TOGETHER:
        return grams
    return {size: entries}


def _gram(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The smaller Gram matrix in float64, and a bound of its error in the 2-norm."""
    a = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT  # n x k, n the smaller side
    k = a.shape[-1]
    square = torch.linalg.vector_norm(a.flatten(-2), dim=-1, dtype=torch.float64).square() * (1 + 1e-9)
    if a.device.type != "cpu" or a.dtype == torch.float64:
        wide = a.double()
        return wide @ wide.mT, square.max() * ((k + 8) * 2.0**-52)
    total = torch.zeros((*a.shape[:-1], a.shape[-2]), dtype=torch.float64)
    for start in range(0, k, _BLOCK):
        block = a[..., start : start + _BLOCK]
        total += block @ block.mT
    terms = min(k, _BLOCK) + 8
    return total, square.max() * (terms * 2.0**-24 / (1 - terms * 2.0**-24))


def _largest_eigenvalue(grams: list[Tensor], size: int) -> Tensor:
    """Upper bounds of the 2-norms of symmetric matrices, padded with zeros to one size."""
    stack = grams[0].new_zeros(len(grams), size, size)
    for i, gram in enumerate(grams):
        n = gram.shape[-1]
        stack[i, :n, :n] = gram
    return spectral_norm(stack) if stack.device.type == "cpu" else gram_iteration(stack, _ITERATIONS)
