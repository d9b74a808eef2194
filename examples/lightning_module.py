"""A LightningModule, private. Lines marked "private" are all that differs from the usual script.

Run it with ``python examples/lightning_module.py`` (needs lightning).
"""

from __future__ import annotations

import sys

import lightning as L  # pyright: ignore[reportMissingImports]
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weightclip.integrations import Privacy, make_private_module  # private


class Digits(L.LightningModule):
    """A small network, as in Lightning's first lesson."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        return self.loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
x, y = (torch.tensor(t) for t in load_digits(return_X_y=True))
torch.manual_seed(0)
module = Digits()
loader = DataLoader(TensorDataset(x.float() / 16, y), batch_size=256, shuffle=True)
module, loader, callback = make_private_module(module, loader, Privacy(3.0, 1e-5), epochs=epochs)  # private
trainer = L.Trainer(
    max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
    callbacks=[callback],  # private
)  # fmt: skip
trainer.fit(module, loader)  # type: ignore[arg-type]
print("epsilon", round(callback.engine.get_epsilon(1e-5), 3))  # private
