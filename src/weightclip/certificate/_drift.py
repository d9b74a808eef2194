"""How far a layer's operator has moved since its norm was last certified (SOUNDNESS Theorem 11)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightclip.bounds import narrow_norm, row_frobenius
from weightclip.certificate._bank import as_matrix

_NARROW = 8  # smaller side from which the spectral norm of what moved is bounded, not only its Frobenius norm
_LONG = 1 << 18  # terms of a sum beyond which 16-bit products have no margin to speak of
_ROUNDED = 2.0**-23  # share of the Frobenius norm that subtracting rounds away, and twice that


def drift(module: nn.Module, now: Tensor, then: Tensor) -> Tensor:
    """Upper bound of ‖R_now − R_then‖₂, R the weight as a matrix (its blocks, for groups), as a float64 scalar.

    The Frobenius norm in one pass; on a device, where 16-bit products cost little, also ``narrow_norm``, which for a
    wide layer is many times smaller. Nothing waits for the device.

    Formal guarantees:
        At least the norm of the exact difference of the two stored weights. NaN or inf where one is not finite.
    """
    moved = now - then if now.dtype in (torch.float32, torch.float64) else now.float() - then.float()
    size = found = row_frobenius(moved.reshape(moved.shape[0], -1))
    matrix = as_matrix(module, moved)
    if matrix.dim() == 2 and _worth(matrix):
        found = torch.minimum(size, narrow_norm(matrix, size=size))  # either is a bound; a NaN stays
    return found + size * _ROUNDED


def _worth(matrix: Tensor) -> bool:
    usual = min(matrix.shape) >= _NARROW and max(matrix.shape) <= _LONG
    return usual and matrix.device.type != "cpu" and matrix.dtype == torch.float32 and _as_proved()


def _as_proved() -> bool:
    """Whether 16-bit products are what the proof is of: added in float32, with numbers below the normal ones kept."""
    narrow = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return torch.version.hip is None and not narrow
