"""Private training of a model that is sharded over processes. Run: ``torchrun --nproc-per-node 2 examples/fsdp2.py``.

The lines of FSDP2 are the usual ones: ``init_process_group``, ``fully_shard`` for each block and then for the model, an
optimiser over its parameters. The rest is as on one device: every process has the whole data set and an ordinary
loader, batch sizes are those of all processes together. A process never holds the sums, the noise or the optimiser's
state of more than its own rows. Checkpoints are written by all processes, and are read by any number of them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc


def main(epochs: int, epsilon: float, seed: int | None, folder: Path) -> None:
    """Train on 1,400 digits with a ledger and a checkpoint in ``folder``; rank 0 prints what came out."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0).float(), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    engine = wc.PrivacyEngine(ledger=folder / "run.ledger")  # rank 0 holds the file
    model, optimizer, loader, loss = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(x[train], y[train]), batch_size=280),
        criterion=nn.CrossEntropyLoss(),
        target_epsilon=epsilon,
        target_delta=1e-5,
        epochs=epochs,
        max_physical_batch_size=128,
        exact_sums=True,  # with a seed, any number of processes gives the same bits
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )
    for _ in range(epochs):
        for a, b in loader:
            optimizer.zero_grad()
            loss(model(a), b).backward()
            optimizer.step()
    engine.save(folder / "checkpoint")  # on all ranks: each writes its rows
    with torch.no_grad():  # all ranks: a pass gathers weights
        accuracy = 100 * float((model(x[test]).argmax(1) == y[test]).float().mean())
    if engine.ranks.first:
        print(
            f"{engine.ranks.count} processes, {engine.steps} steps: test accuracy {accuracy:.2f}%, "
            f"epsilon {engine.get_epsilon(1e-5):.3f} at delta 1e-5"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Private training of a sharded model.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=None, help="for experiments; by default noise is secret")
    parser.add_argument("--folder", type=Path, default=None, help="of ledger and checkpoint, seen by all processes")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    place = [str(options.folder or tempfile.mkdtemp(prefix="weightclip-fsdp2-"))]
    dist.broadcast_object_list(place, src=0)
    Path(place[0]).mkdir(parents=True, exist_ok=True)
    main(options.epochs, options.epsilon, options.seed, Path(place[0]))
    dist.destroy_process_group()
