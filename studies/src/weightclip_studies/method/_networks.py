"""Small trained networks on data that is always there, for measuring bounds: tabular MLPs and a ConvNet on digits."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip.bounds import Rescale, norm_function
from weightclip.models import MLP, ConvNet
from weightclip_studies import data as sets


class Prepared(NamedTuple):
    """A tabular set, encoded by public ranges and split."""

    X: np.ndarray
    y: np.ndarray
    parts: sets.Split
    classes: int
    radius: float  # public: root of the number of columns, about the norm of a row


def prepare(name: str) -> Prepared:
    """Load, split with seed 0 and encode."""
    table = sets.load(name)
    parts = sets.split(table, seed=0)
    encoded = sets.encode(table, fit_on=parts.train, statistics=sets.PublicRanges())
    return Prepared(encoded.X, encoded.y, parts, len(table.classes), math.sqrt(len(table.columns)))


def table(name: str) -> tuple[Tensor, Tensor, int]:
    """Training records of a tabular set, encoded by public ranges and projected on the unit ball."""
    data = prepare(name)
    rows = data.parts.train
    x = torch.tensor(data.X[rows], dtype=torch.float32)
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1.0)
    return x, torch.tensor(data.y[rows]).long(), data.classes


def digits(size: int = 28) -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits, enlarged, projected on the unit ball."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    return x / x.flatten(1).norm(dim=1).clamp(min=1.0).view(-1, 1, 1, 1), torch.tensor(labels).long()


def train(model: nn.Module, x: Tensor, y: Tensor, *, steps: int, limit: float | None = None, lr: float = 1e-2) -> None:
    """Ordinary training; with a limit, ClipWeights after every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(0)
    clipped = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    for _ in range(steps):
        rows = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        for module in clipped if limit is not None else ():
            Rescale()(module.weight.detach(), float(limit or 0), norm_function(module))


def mlp(features: int, classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """The paper's MLP."""
    torch.manual_seed(0)
    return MLP(features, hidden, classes)


def convnet(small: bool) -> nn.Module:
    """The paper's ConvNet, or one of a tenth of its width on 12 x 12 pictures."""
    torch.manual_seed(0)
    if not small:
        return ConvNet()
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 36, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def record_norms(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Exact norm of every record's gradient of each layer (weight and bias together)."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (a[None],)), b[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), chunk_size=64)(parameters, x, y)
    squares: dict[str, Tensor] = {}
    for name, value in gradients.items():
        path = name.rsplit(".", 1)[0]
        squares[path] = squares.get(path, torch.zeros(len(x))) + value.detach().flatten(1).double().square().sum(1)
    return {path: value.sqrt() for path, value in squares.items()}
