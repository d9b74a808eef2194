"""A head that starts from the means of each class's features, released with noise and paid for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from weightclip.accounting import Mechanism
from weightclip.noise import Streams
from weightclip.tabular import Door, release

_ASIDE = 1 / 3  # weight of the counts beside the sums
_ONE = 2.0**30  # sums are kept in whole units of 1/_ONE
_TOUCHED = (1 + _ASIDE**2) * (1 + 1e-5)  # squared norm of what one record adds, rounding included


def cost(sigma: float) -> tuple[Mechanism, ...]:
    """What a start of this multiplier releases; nothing where it is 0."""
    return (Mechanism("gaussian", sigma, 1.0, 1, label="means of the classes"),) if sigma else ()


def class_means(features: Tensor, labels: Tensor, sigma: float, streams: Streams) -> np.ndarray:
    """Noisy means of the features of two classes.  # 2 x width

    Args:
        features: Vectors of length one at most; longer ones are cut.
        labels: 0 or 1.
        sigma: Noise multiplier; 0 is not private.
        streams: Randomness.

    Formal guarantees:
        One Gaussian mechanism of multiplier `sigma` under adding or removing one record: it releases, for each class,
        the sum of the features and a third of the count. A record adds to one class, by at most √(1 + 1/9) in l2 norm.
        Terms are whole multiples of 2^-30 and their sums are exact; a record that is not finite counts zero. Means are
        post-processing.
    """
    rows = features.detach().double().cpu().numpy()
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    rows = np.concatenate([_cut(np.where(finite, rows, 0.0)), _ASIDE * finite], axis=1)
    whole = np.rint(rows * _ONE).astype(np.int64)
    found = labels.cpu().numpy()
    sums = np.stack([whole[found == c].sum(axis=0) for c in (0, 1)]) / _ONE
    noisy = release(sums, _TOUCHED, sigma, Door(streams), "text/means")
    counts = np.maximum(noisy[:, -1:] / _ASIDE, 1.0)
    return noisy[:, :-1] / counts


@torch.no_grad()
def start(head: nn.Linear, means: np.ndarray, scale: float) -> None:
    """Put a head where it tells the means apart, with scores one apart from the middle; it reads features·scale."""
    apart, middle = means[1] - means[0], means.mean(axis=0)
    weight = apart / max(float(apart @ apart), 1e-6)
    bias = -float(weight @ middle)
    for c, sign in ((0, -1.0), (1, 1.0)):
        head.weight[c] = torch.from_numpy(sign * weight / scale)
        head.bias[c] = sign * bias


def _cut(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)
