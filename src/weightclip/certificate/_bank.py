"""Certified norms of all layers of a model at once: one Gram matrix per layer, then batched work on the small ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from weightclip._device import constant
from weightclip._torch import ConvNd, ConvTransposeNd
from weightclip.bounds import gram_iteration, kernel_overlap, largest_eigenvalues, proved_eigenvalue, spectral_number

_BLOCK = 1024  # terms a float32 product may add up before its result goes into a float64 sum
_LARGE = 1 << 21  # multiply-adds beyond which a CPU Gram matrix is formed in float32 blocks
_TOGETHER = 1 << 30  # multiply-adds of one product of a batch, below which matrices of all sizes share it
_WIDE = 2048  # order (rounded up to a power of two) from which a proof takes a device less time than nine products
_ITERATIONS = 9  # excess of the Gram iteration: below n^(1/2^(J+2)), 0.3% at n = 256


@dataclass(frozen=True)
class _Part:
    """The Gram matrix of a layer's weight, or of one group of it."""

    layer: int
    gram: Tensor
    share: float  # of its trace: bounds its error
    narrow: bool  # whether the weight was float32 or narrower


class NormBank:
    """sqrt(m) ||R||_2 of every Linear and Conv layer, R the weight as a matrix and m the kernel overlap.

    Formal guarantees:
        Every number returned is an upper bound of the layer's l2 operator norm at the present weights (cast to
        ``dtype``), the rounding of this computation included; only weights are read. Nothing waits for the device,
        unless the caller lets it.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = dict(layers)
        self.factors = {}
        for path, module in self.layers.items():
            conv = isinstance(module, ConvNd)
            self.factors[path] = math.sqrt(kernel_overlap(module)) if conv else 1.0

    def weights(self) -> list[Tensor]:
        """The weights as they are now, in the order of the layers."""
        return [cast(Tensor, module.weight).detach() for module in self.layers.values()]

    def numbers(self, weights: list[Tensor], dtype: torch.dtype = torch.float32) -> list[float]:
        """Bounds of all layers in their order, as plain numbers; on a device this waits."""
        matrices = [_matrix(m, w, dtype) for m, w in zip(self.layers.values(), weights, strict=True)]
        if not all(map(_small, matrices)):
            return self.vector(dtype).tolist()
        return [spectral_number(m) * (f * (1 + 1e-12)) for m, f in zip(matrices, self.factors.values(), strict=True)]

    def vector(self, dtype: torch.dtype = torch.float32, wait: bool = False) -> Tensor:
        """Bounds of all layers in their order, float64.

        Args:
            dtype: type that the forward pass casts weights to.
            wait: whether the host may wait for the device, which makes the norms of wide layers cheaper and tighter.
                Not within what is recorded.
        """
        parts: dict[int, list[_Part]] = {}  # by size
        found: list[list[Tensor]] = [[] for _ in self.layers]
        for i, (module, weight) in enumerate(zip(self.layers.values(), self.weights(), strict=True)):
            matrix = _matrix(module, weight, dtype)
            if _small(matrix):
                found[i].append(torch.tensor(spectral_number(matrix), dtype=torch.float64))
                continue
            gram, share = _gram(matrix)
            size = 1 << max(0, (gram.shape[-1] - 1).bit_length())  # the next power of two
            for part in gram if gram.dim() == 3 else gram[None]:
                parts.setdefault(size, []).append(_Part(i, part, share, matrix.dtype != torch.float64))
        groups = _merged(parts)
        if len(groups) == 1 and [p.layer for p in next(iter(groups.values()))] == list(range(len(self.layers))):
            norms = _largest(*groups.popitem(), wait)  # one matrix a layer, in one batch: the usual case on a device
        else:
            for size, entries in groups.items():
                for part, norm in zip(entries, _largest(size, entries, wait).unbind(), strict=True):
                    found[part.layer].append(norm)
            norms = torch.stack([p[0] if len(p) == 1 else torch.stack(p).amax() for p in found])
        return norms * constant(tuple(f * (1 + 1e-12) for f in self.factors.values()), norms.device)


def _small(matrix: Tensor) -> bool:
    """Whether all eigenvalues in float64 cost little."""
    return matrix.is_cpu and matrix.dim() == 2 and matrix.numel() * min(matrix.shape) < _LARGE


def _matrix(module: nn.Module, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as (rows, columns), or (groups, rows, columns) for a grouped convolution."""
    return as_matrix(module, as_cast(weight, dtype))


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """Any tensor of the weight's shape as (rows, columns), or (groups, rows, columns) for a grouped convolution."""
    if not isinstance(module, ConvNd):
        return weight
    if isinstance(module, ConvTransposeNd) or module.groups > 1:
        return weight.reshape(module.groups, weight.shape[0] // module.groups, -1)
    return weight.flatten(1)


def as_cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers the forward pass multiplies by, in the type the weight is stored in; float32 stands for no cast."""
    return weight if weight.dtype == dtype or dtype == torch.float32 else weight.to(dtype).to(weight.dtype)


def _merged(parts: dict[int, list[_Part]]) -> dict[int, list[_Part]]:
    """On a device, all matrices as one batch of the largest size where that is little work: fewer launches."""
    entries = [entry for group in parts.values() for entry in group]
    size = max(parts, default=0)
    if not entries or entries[0].gram.device.type == "cpu" or len(entries) * size**3 > _TOGETHER:
        return parts
    return {size: sorted(entries, key=lambda part: part.layer)}


def _gram(matrix: Tensor) -> tuple[Tensor, float]:
    """The smaller Gram matrix in float64, and its error in the 2-norm as a share of its trace.

    Each entry of A A^T has an error of at most gamma_k (|A| |A|^T), of 2-norm at most gamma_k ||A||_F^2, and the
    computed trace is at least (1 - gamma_k) ||A||_F^2.
    """
    a = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT  # n x k, n the smaller side
    k = a.shape[-1]
    if a.device.type != "cpu" or a.dtype == torch.float64 or _narrowed():
        wide = a.double()
        return wide @ wide.mT, (k + 8) * 2.0**-52
    total = torch.zeros((*a.shape[:-1], a.shape[-2]), dtype=torch.float64)
    for start in range(0, k, _BLOCK):
        block = a[..., start : start + _BLOCK]
        total += block @ block.mT
    terms = min(k, _BLOCK) + 8
    return total, terms * 2.0**-24 / (1 - 2 * terms * 2.0**-24)


def _narrowed() -> bool:
    """Whether products of float32 matrices on the CPU may be rounded to less: by autocast or by a setting of torch."""
    precision = cast(Any, torch.backends).mkldnn.matmul.fp32_precision
    return torch.is_autocast_enabled("cpu") or precision not in ("ieee", "none")


def _largest(size: int, entries: list[_Part], wait: bool = False) -> Tensor:
    """Upper bounds of ||A||_2 from symmetric matrices A A^T, padded with zeros to one size."""
    if wait and size >= _WIDE and entries[0].gram.device.type != "cpu":
        return _largest_proved(size, entries)
    stack = entries[0].gram.new_zeros(len(entries), size, size)
    for i, part in enumerate(entries):
        n = part.gram.shape[-1]
        stack[i, :n, :n] = part.gram
    if stack.device.type == "cpu":
        norms = largest_eigenvalues(stack)
    else:  # sums of products of float32 numbers: none is above 1e82
        stack.diagonal(dim1=-2, dim2=-1).add_(1e-80)  # enlarges the norm by that, so that no matrix is zero
        norms = gram_iteration(stack, _ITERATIONS, moderate=all(part.narrow for part in entries))
    trace = stack.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (norms + trace * constant(tuple(part.share * (1 + 1e-9) for part in entries), stack.device)).sqrt()


def _largest_proved(size: int, entries: list[_Part]) -> Tensor:
    """The same one by one, as far as a guess can be proved."""
    found = []
    for part in entries:
        top = proved_eigenvalue(part.gram)
        if top is None:
            found.append(_largest(size, [part])[0])
            continue
        error = part.gram.trace() * (part.share * (1 + 1e-9))
        found.append((error + top).sqrt() * (1 + 2.0**-50))
    return torch.stack(found)
