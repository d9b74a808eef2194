"""What the processes of a run compare, before its first step and before every release (SOUNDNESS Theorem 32)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from weightclip.distributed import Ranks
from weightclip.engine._checkpoint import feed
from weightclip.engine._digest import settings_digest
from weightclip.sampling import KeyedRecords, Wanted

if TYPE_CHECKING:
    from weightclip.engine._engine import PrivacyEngine
    from weightclip.engine._step import Training

_LOOKED_AT = 16  # records of the data set that ranks compare


@torch.no_grad()
def share_weights(ranks: Ranks, model: nn.Module, seeded: bool) -> None:
    """Every rank starts from rank 0's parameters and buffers, whatever its own seed made of them."""
    state = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, t.dtype, tuple(t.shape), t.requires_grad) for name, t in state]
    ranks.agree(lambda: {"the model": repr(shapes).encode(), "whether generator= is given": str(seeded).encode()})
    ranks.spread([t.detach() for _, t in state])


def agree_on_run(engine: PrivacyEngine) -> None:
    """All settings, seeds and data are the same on every rank.

    Which promise needs it: a record of a draw is computed by whichever rank its place in the draw falls to. With other
    data on some rank one more record would change which others are in the sum, not only where.
    """
    engine.ranks.agree(
        lambda: {
            "the seed": engine.streams.key("weightclip/agree"),
            "settings": settings_digest(engine),
            "the data set (give every rank the whole of it, in one order)": _glance(engine),
        }
    )


def _glance(engine: PrivacyEngine) -> bytes:
    """A digest of the data set's length and of a few records, read with generators set to the same state.

    Of a table of tensors all records count.
    """
    dataset: Any = engine.loader.dataset
    n, digest = len(dataset), hashlib.blake2b(key=engine.streams.key("weightclip/glance"), digest_size=32)
    digest.update(str(n).encode())
    if isinstance(dataset, TensorDataset):
        digest.update(_checksum(dataset.tensors))
    places = sorted(set(np.linspace(0, n - 1, min(n, _LOOKED_AT)).astype(int).tolist()))
    feed(digest, KeyedRecords(dataset).__getitems__(Wanted(places, None, None, bytes(32), 0)).records)
    return digest.digest()


def agree_on_step(training: Training) -> None:
    """The number of the step, the weights, the units of the sums and the modes are the same on every rank."""
    engine, exact = training.engine, training.release.exact
    engine.ranks.check()
    engine.ranks.agree(
        lambda: {
            "the number of the step": str(engine.steps).encode(),
            "the weights": _checksum([*training.model.parameters(), *training.model.buffers()]),
            "the grid of sums": json.dumps(None if exact is None else exact.units).encode(),
        }
    )


@torch.no_grad()
def _checksum(tensors: Sequence[Tensor]) -> bytes:
    """Tells tensors apart that differ in any bit, but for differences that cancel in a sum: no defence, a safety net.

    Digests of all bits would take as long as a good part of the step; the start of a run compares those of the weights.
    """
    words = {1: torch.uint8, 2: torch.int16}
    flats = [t.detach().contiguous().reshape(-1) for t in tensors if t.numel()]
    sums = [t.view(words.get(t.element_size(), torch.int32)).sum(dtype=torch.int64) for t in flats]
    return torch.stack(sums).cpu().numpy().tobytes() if sums else b""
