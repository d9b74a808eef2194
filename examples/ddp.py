"""Private training on several processes. Run it with ``torchrun --nproc-per-node 2 examples/ddp.py``.

Two lines are not those of a single process: ``init_process_group`` at the top and ``destroy_process_group`` at the end.
The model is the plain one (no ``DistributedDataParallel``), the data loader is the ordinary one over the whole data set
(no ``DistributedSampler``), and batch sizes are those of all processes together: the engine draws once, gives every
process its part of each draw, adds the sums up, and makes the noise once. ``python examples/ddp.py`` runs it alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc


def main(epochs: int, epsilon: float, seed: int | None, folder: Path) -> None:
    """Train on 1,400 digits with a ledger and a checkpoint in ``folder``; rank 0 prints what came out."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0).float(), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    engine = wc.PrivacyEngine(ledger=folder / "run.ledger")  # rank 0 holds the file
    model, optimizer, loader, loss = engine.make_private_with_epsilon(
        module=model,  # every process starts from the weights of rank 0
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(x[train], y[train]), batch_size=280),
        criterion=nn.CrossEntropyLoss(),
        target_epsilon=epsilon,
        target_delta=1e-5,
        epochs=epochs,
        max_physical_batch_size=64,
        exact_sums=True,  # with a seed, any number of processes gives the same bits
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )
    for _ in range(epochs):
        for a, b in loader:
            optimizer.zero_grad()
            loss(model(a), b).backward()
            optimizer.step()
    engine.save(folder / "checkpoint")  # on any rank; rank 0 writes
    with torch.no_grad():
        accuracy = 100 * float((model(x[test]).argmax(1) == y[test]).float().mean())
    if engine.ranks.first:
        print(
            f"{engine.ranks.count} processes, {engine.steps} steps: test accuracy {accuracy:.2f}%, "
            f"epsilon {engine.get_epsilon(1e-5):.3f} at delta 1e-5"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Private training on several processes.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=None, help="for experiments; by default noise is secret")
    parser.add_argument("--folder", type=Path, default=None, help="of ledger and checkpoint")
    options = parser.parse_args()
    together = "RANK" in os.environ  # started by torchrun
    if together:
        dist.init_process_group("gloo")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="weightclip-ddp-"))
    folder.mkdir(parents=True, exist_ok=True)
    main(options.epochs, options.epsilon, options.seed, folder)
    if together:
        dist.destroy_process_group()
