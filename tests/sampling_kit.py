"""Tools of the sampling tests: numbered records, a loader that tells what it hands out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
)

from weightclip.noise._streams import Streams
from weightclip.sampling._loader import BatchInfo, PoissonLoader


class Spy(Streams):
    """Remembers which streams were asked for."""

    asked: list[tuple[Any, ...]]

    def numpy(self, label: str, *ints: int) -> np.random.Generator:
        self.asked.append((label, *ints))
        return super().numpy(label, *ints)


class Numbers(Dataset):
    """Record i is (i + 1, label), so that a zero is never a record."""

    def __init__(self, n: int, form: str = "tuple") -> None:
        self.n, self.form = n, form

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        x, y = torch.full((2,), float(i + 1)), i % 3 + 1
        return {
            "tuple": (x, y),
            "dict": {"x": x, "more": (y, {"z": x.double()})},
            "text": (x, f"r{i}"),
        }[self.form]


def tensors(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(1.0, n + 1)[:, None].repeat(1, 2), torch.arange(n) % 3 + 1)


def poisson(dataset: Any, *, q: float | None = 0.2, seed: int = 0, loader: dict[str, Any] | None = None, **kwargs: Any):
    """A loader and the list its BatchInfos go to."""
    infos: list[BatchInfo] = []
    kwargs = {"streams": Streams.seeded(seed), "on_batch": infos.append, **kwargs}
    return PoissonLoader(DataLoader(dataset, **{"batch_size": 4, **(loader or {})}), sample_rate=q, **kwargs), infos


def numbers(batch: Any) -> list[int]:
    x = batch["x"] if isinstance(batch, dict) else batch[0]
    return (x[:, 0] - 1).int().tolist()


def draws(loader: PoissonLoader, infos: list[BatchInfo]) -> list[list[int]]:
    """The real record numbers of each draw of one pass."""
    out: list[list[int]] = []
    infos.clear()
    for batch in loader:
        info = infos[-1]
        got = numbers(batch)
        assert len(got) == info.rows
        real = [True] * info.rows if info.mask is None else info.mask.tolist()
        if info.piece == 0:
            out.append([])
        out[-1] += [v for v, here in zip(got, real, strict=True) if here]
        assert all(v == -1 for v, here in zip(got, real, strict=True) if not here)
    return out
