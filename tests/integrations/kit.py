"""Small tasks for the loops of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from weightclip.integrations import Privacy

PRIVACY = Privacy(epsilon=2.0, delta=1e-5)
DELTA = PRIVACY.delta


def table(n: int = 96) -> TensorDataset:
    """Six columns, two classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class Tokens(Dataset):
    """Sequences of one length, as tokenisers give them."""

    def __init__(self, n: int = 48, length: int = 6) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, 40, (n, length), generator=generator)
        self.labels = (self.ids[:, 0] > 20).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i]), "labels": self.labels[i]}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def finite(values: Any) -> bool:
    return all(torch.isfinite(torch.as_tensor(v)).all() for v in values)
