# %% [markdown]
# # From Opacus to weightclip in ten lines
#
# The call has the same shape; what comes back are your own objects, and the loss, because its gradient bound is part of
# the guarantee. Run it with ``python examples/from_opacus.py`` (with Opacus installed, both are trained).

# %%
from __future__ import annotations

import sys
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
records, labels = load_breast_cancer(return_X_y=True)
X, y = torch.tensor(records).float(), torch.tensor(labels)
X = X / (X.norm(dim=1, keepdim=True) + 1)  # each record by itself: nothing is learnt from the others


def network() -> nn.Module:
    """An ordinary network; no special layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(X.shape[1], 16), nn.ReLU(), nn.Linear(16, 2))


# %% [markdown]
# ## With Opacus
# Per-sample gradients, clipped to norm 1.

# %%
try:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import PrivacyEngine as Opacus
except ImportError:
    Opacus = None

if Opacus is not None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(X, y), batch_size=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine: Any = Opacus()  # what it returns depends on its arguments
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, target_epsilon=3.0, target_delta=1e-5,
            epochs=epochs, max_grad_norm=1.0,
        )  # fmt: skip
        loss = nn.CrossEntropyLoss()
        for _ in range(epochs):
            for x, t in loader:
                optimizer.zero_grad()
                loss(model(x), t).backward()
                optimizer.step()
        print(f"Opacus      epsilon {engine.get_epsilon(1e-5):.3f}")

# %% [markdown]
# ## With weightclip
# No per-sample gradients: each layer's two factors are bounded instead. Four objects come back, always in this order;
# `max_grad_norm` becomes a `joint_cap`, which on dense layers is the same clipping. The loop stays as it was.

# %%
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(X, y), batch_size=100)
engine = wc.PrivacyEngine()
model, optimizer, loader, loss = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, criterion=nn.CrossEntropyLoss(), target_epsilon=3.0,
    target_delta=1e-5, epochs=epochs, bounds=wc.Bounds(joint_cap=1.0), generator=torch.Generator().manual_seed(0),
)  # fmt: skip
for _ in range(epochs):
    for x, t in loader:
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
print(f"weightclip  epsilon {engine.get_epsilon(1e-5):.3f}, same accountant question, PLD instead of RDP")

# %% [markdown]
# The trained weights have native names and load into the plain model; the certificate says what was enforced.

# %%
network().load_state_dict(model.state_dict())
print(engine.certificate())
