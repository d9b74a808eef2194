"""Tries to break a trained head's sensitivities: a record's exact contribution against Delta_k, alone and in a sum."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from weightclip_studies.images._heads import Contribution, HeadTrainer
from weightclip_studies.images._product import Features


def largest_shares(trainer: HeadTrainer, records: int = 48, seed: int = 0) -> dict[str, float]:
    """Largest contribution found, as a share of what the noise was scaled to; above 1 the run is not private.

    Tries real records with their own labels and with the label the model finds least likely (the largest loss), each
    alone, and each as the difference of two sums over a batch that differ by that record (rounding included).

    Returns:
        ``alone`` and ``in_sum``: largest of sqrt(sum_k ||g_k||^2/Delta_k^2 / K) for separately bounded layers (each
        share at most 1), or of sqrt(sum_k ||g_k||^2/t_k^2) for the joint cap; ``layer_<k>``: largest ||g_k||/Delta_k.
    """
    data, device = trainer.data, trainer.flat.device
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[: max(records, 64)].to(device)
    part = data.subset(rows)
    logits = trainer.logits(part, averaged=False)
    worst = torch.cat([logits.argmin(1), part.labels[-1:]])
    shares: dict[str, float] = {"alone": 0.0, "in_sum": 0.0}
    count = len(part)
    padding = torch.full((-(count) % 16 + 15,), count, device=device)
    everything = torch.arange(count, device=device)
    for labels in (part.labels, worst):
        other = _on(trainer, dataclasses.replace(part, labels=labels))
        whole = other.contribution(_padded(everything, count))
        for i in range(records):
            alone = other.contribution(torch.cat([everything[i : i + 1], padding[:15]]))
            _record(shares, "alone", trainer, alone.sums, alone)
            rest = other.contribution(_padded(everything[everything != i], count))
            moved = [
                tuple(a - b for a, b in zip(x, y, strict=True)) for x, y in zip(whole.sums, rest.sums, strict=True)
            ]
            _record(shares, "in_sum", trainer, moved, alone)  # pyright: ignore[reportArgumentType]
    return shares


def _padded(rows: Tensor, zero: int) -> Tensor:
    return torch.cat([rows, rows.new_full((-len(rows) % 16,), zero)])


def _on(trainer: HeadTrainer, data: Features) -> HeadTrainer:
    """The same head looking at other records."""
    other = object.__new__(HeadTrainer)
    other.__dict__.update(trainer.__dict__, data=data)
    return other


def _record(
    shares: dict[str, float], name: str, trainer: HeadTrainer, sums: list[tuple[Tensor, Tensor]], c: Contribution
) -> None:
    norms = torch.stack([(w.square().sum() + b.square().sum()).sqrt() for w, b in sums])
    ratios = norms / c.sensitivities
    joint = trainer.settings.joint_cap is not None
    total = ratios.square().sum() if joint else ratios.square().mean()
    shares[name] = max(shares[name], float(total.sqrt()))
    for k, ratio in enumerate(ratios.tolist()):
        shares[f"layer_{k}"] = max(shares.get(f"layer_{k}", 0.0), ratio)
