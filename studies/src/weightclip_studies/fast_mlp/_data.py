"""Private records of a stack of runs: cleaned, drawn by Poisson sampling, looked up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weightclip.errors import WeightclipError
from weightclip.noise import SAMPLING, Streams
from weightclip.sampling import poisson_indices

from ._objectives import Objective


class Data:
    """Records, their labels, and which of them each seed may draw."""

    def __init__(self, X, y, objective: Objective, subsets, seeds: int, device: torch.device) -> None:
        self.device = device
        x = torch.as_tensor(X).to(device)
        x = x if x.dtype == torch.float16 else x.float()  # large tables are kept in half precision
        if x.dim() != 2:
            raise WeightclipError(f"train_many: X must be records x features, got shape {tuple(x.shape)}.")
        self.square = _squares(x)
        if not bool(torch.isfinite(self.square).all()):  # a record with an entry that is not finite
            x = _clean(x)
            self.square = _squares(x)
        self.x = x
        self.shape = (int(X.shape[0]), int(X.shape[1]))
        self.y = objective.labels(y).to(device)
        if self.shape[0] == 0 or self.y.shape != (self.shape[0],):
            raise WeightclipError(f"train_many: {self.shape[0]} records and labels of shape {tuple(self.y.shape)}.")
        if subsets is not None and (len(subsets) != seeds or len({len(rows) for rows in subsets}) != 1):
            raise WeightclipError("train_many: subsets must be as many as seeds, and of one length.")
        self.subsets = None if subsets is None else [np.asarray(rows, dtype=np.int64) for rows in subsets]
        self.n = self.shape[0] if self.subsets is None else len(self.subsets[0])

    def look_up(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Drawn records in float64 and their squared norms.  # seeds x rows -> seeds x rows x features, seeds x rows"""
        x, square = self.x.index_select(0, index.flatten()).float(), self.square[index.flatten()]
        return x.view(*index.shape, -1).double(), square.view(index.shape)

    def draw(self, streams: Sequence[Streams], q: float, step: int) -> tuple[Tensor, Tensor | None]:
        """Record numbers of one draw per seed, padded to one length, and which of them count."""
        drawn = []
        for s, stream in enumerate(streams):
            rows = np.arange(self.n) if q == 1 else poisson_indices(stream.numpy(SAMPLING, step), q, self.n)
            drawn.append(rows if self.subsets is None else self.subsets[s][rows])
        width = max(1, *(len(rows) for rows in drawn))
        padded = np.zeros((len(drawn), width), dtype=np.int64)
        for s, rows in enumerate(drawn):
            padded[s, : len(rows)] = rows
        index = torch.from_numpy(padded).to(self.device)
        if all(len(rows) == width for rows in drawn):
            return index, None
        counts = torch.tensor([len(rows) for rows in drawn], device=index.device)
        return index, torch.arange(width, device=index.device) < counts[:, None]


def _clean(x: Tensor) -> Tensor:
    """Records with a non-finite entry become zeros: never stop on data."""
    return torch.where(torch.isfinite(x).all(1, keepdim=True), x, torch.zeros((), device=x.device))


def _squares(x: Tensor) -> Tensor:
    """Squared norms of the records, in float64; in pieces, because a whole copy of a large table would be too much."""
    out = torch.empty(len(x), dtype=torch.float64, device=x.device)
    for start in range(0, len(x), 4096):
        out[start : start + 4096] = x[start : start + 4096].double().square().sum(1)
    return out
