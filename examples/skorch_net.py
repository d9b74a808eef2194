"""A skorch classifier, private. Lines marked "private" are all that differs from the usual script.

Run it with ``python examples/skorch_net.py`` (needs skorch).
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier  # pyright: ignore[reportMissingImports]
from torch import nn

from weightclip.integrations import Privacy, PrivateNet  # private


class Net(PrivateNet, NeuralNetClassifier):  # private
    """The classifier."""


epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
torch.manual_seed(0)
net = Net(
    nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    lr=0.01,
    batch_size=256,
    max_epochs=epochs,
    train_split=None,  # private: scores of held-out records would not be covered
    privacy=Privacy(3.0, 1e-5),  # private
)
net.fit(x[:1500], y[:1500])
print("accuracy on 297 records that stand for public ones", round(float(net.score(x[1500:], y[1500:])), 3))
