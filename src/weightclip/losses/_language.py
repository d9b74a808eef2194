"""The loss of a causal language model: each token is predicted from those before it, and a record is a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightclip.errors import ContractError
from weightclip.losses._base import Loss, Shape
from weightclip.losses._cross_entropy import CrossEntropy


@dataclass(frozen=True)
class CausalLM(Loss):
    """Cross-entropy of the next token, averaged over all positions of a sequence, those without a label included.

    Outputs are (N, T, vocabulary), labels (N, T), usually the tokens themselves: position t is compared with label
    t + 1, as models of transformers do given ``labels=``. Their own ``.loss`` is a mean over the labelled tokens of the
    whole batch, whose number is private; here the divisor is T - 1 for everyone.

    Attributes:
        ignore_index: label of positions to leave out.

    Formal guarantees:
        As `Loss`: those of `CrossEntropy` with T - 1 positions.
    """

    ignore_index: int = -100

    @property
    def _inner(self) -> CrossEntropy:
        return CrossEntropy(ignore_index=self.ignore_index)

    def _values(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self._inner._values(*_shifted(z, y))

    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g, ok = self._inner._gradient(*_shifted(z, y))
        return torch.nn.functional.pad(g.movedim(1, -1), (0, 0, 0, 1)), ok

    def _bound(self, shape: Shape, p: float) -> float:
        positions, vocabulary = shape
        return self._inner._bound((vocabulary, positions - 1), p)


def _shifted(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if z.dim() != 3 or y.shape != z.shape[:2] or z.shape[1] < 2:
        raise ContractError(
            f"CausalLM: labels of shape {tuple(y.shape)} for outputs {tuple(z.shape)}; give (records, T, vocabulary) "
            "and (records, T), T at least 2"
        )
    return z[:, :-1].movedim(-1, 1), y[:, 1:]
