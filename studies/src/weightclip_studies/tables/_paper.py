"""What the paper printed for tabular data: Table 1, the detailed table, and the space it searched."""

from __future__ import annotations

from dataclasses import dataclass

from weightclip.errors import WeightclipError


@dataclass(frozen=True)
class Printed:
    """One row of Table 1 and of the detailed table: accuracy by method, without and with group normalisation.

    Attributes:
        epsilon: The claimed ε; δ is 1/n.
        records: n, as the paper counts (one less than printed in the Android file).
        plain: DP-SGD, Lip-DP-SGD and Fix-Lip-DP-SGD without group normalisation (Table 1).
        grouped: The same with it.
        other_fix_lip: A second value the paper prints for Fix-Lip-DP-SGD in the other table.
    """

    epsilon: float
    records: int
    plain: tuple[float, float, float]
    grouped: tuple[float, float, float]
    other_fix_lip: float | None = None


PRINTED: dict[str, Printed] = {
    "adult": Printed(0.414, 48842, (0.824, 0.831, 0.804), (0.822, 0.829, 0.713)),
    "android": Printed(1.273, 29332, (0.951, 0.959, 0.945), (0.947, 0.952, 0.701)),
    "breast_cancer": Printed(1.672, 569, (0.773, 0.798, 0.7), (0.813, 0.924, 0.519)),
    "default_credit": Printed(1.442, 30000, (0.809, 0.816, 0.792), (0.804, 0.815, 0.774)),
    "dropout": Printed(1.326, 4424, (0.763, 0.819, 0.736), (0.755, 0.816, 0.573)),
    "german_credit": Printed(3.852, 1000, (0.735, 0.746, 0.768), (0.735, 0.722, 0.493), other_fix_lip=0.68),
    "nursery": Printed(1.432, 12960, (0.919, 0.931, 0.89), (0.916, 0.912, 0.487)),
}

PAPER_SIZES = "140 to 2,120"
"""Parameters of the paper's multi-layer perceptrons (its table of models)."""

_COLUMN = {
    "dp-sgd": 0,
    "dp-sgd-published": 0,
    "lip-published": 1,
    "lip-weights": 1,
    "lip-factors": 1,
    "joint-cap": 1,
    "fix-lip-published": 2,
    "fix-lip": 2,
}


def printed(dataset: str) -> Printed:
    """The paper's row of a data set.

    Raises:
        WeightclipError: If the paper has no such data set.
    """
    if dataset not in PRINTED:
        raise WeightclipError(f"unknown data set {dataset!r}: choose one of {', '.join(PRINTED)}")
    return PRINTED[dataset]


def paper_accuracy(dataset: str, method: str, group_norm: bool) -> float | None:
    """The printed accuracy a method is compared with: its own, or Lip-DP-SGD's for the sound variants of it."""
    if method not in _COLUMN:
        return None
    row = printed(dataset)
    return (row.grouped if group_norm else row.plain)[_COLUMN[method]]


def best_lip(dataset: str) -> float:
    """The better of the two printed Lip-DP-SGD accuracies: the number to beat."""
    row = printed(dataset)
    return max(row.plain[1], row.grouped[1])
