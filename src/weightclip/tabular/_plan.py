"""What is decided before a record is read: the budget, where feature statistics come from, what counts releases."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from weightclip import accounting
from weightclip.accounting import Mechanism
from weightclip.distributed import find_ranks
from weightclip.errors import BudgetSpent, ContractError, WeightclipError
from weightclip.noise import Streams
from weightclip.tabular._columns import Column
from weightclip.tabular._private import Door, charged
from weightclip.tabular._resume import Checkpoint


class _Scaling:
    pieces: int | None

    def __post_init__(self) -> None:
        if self.pieces is not None and (not isinstance(self.pieces, Integral) or not 1 <= int(self.pieces) <= 64):
            owner = type(self).__name__
            raise WeightclipError(f"{owner}: pieces must be a whole number from 1 to 64, got {self.pieces!r}.")


@dataclass(frozen=True)
class PrivateScaling(_Scaling):
    """Feature statistics estimated within the budget: quantiles, ranges where none is public, frequent categories.

    Attributes:
        share: Part of the run's precision 1/σ² that is spent on them; None: by the expected error. The features' means
            take at most a twentieth more.
        pieces: Intervals of a numeric column; None: six.
    """

    share: float | None = None
    pieces: int | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            raise WeightclipError(f"PrivateScaling: share must lie strictly between 0 and 1, got {self.share!r}.")
        super().__post_init__()


@dataclass(frozen=True)
class PublicScaling(_Scaling):
    """Features scaled by public ranges and categories alone: free, and refused where one of them is unknown."""

    pieces: int | None = None


@dataclass(frozen=True)
class NonPrivateScaling(_Scaling):
    """Feature statistics read from the private rows WITHOUT paying: the model's ε is then infinite, and said to be.

    For experiments, and for data whose statistics are public anyway.
    """

    pieces: int | None = None


Preprocessing = PrivateScaling | PublicScaling | NonPrivateScaling


@dataclass(frozen=True)
class FitPlan:
    """Everything that is decided before a record is read."""

    epsilon: float  # budget, preprocessing included
    delta: float  # its δ
    preprocessing: Preprocessing  # where feature statistics come from
    chosen: Mapping[str, Any] = field(default_factory=dict)  # settings of the network that the user chose
    accountant: str = "pld"  # "pld" or "rdp"
    streams: Streams = field(default_factory=Streams.secure)  # randomness
    loss: str = "huber"  # "huber" or "l1" (regression)
    progress: Callable[[int, int], None] | None = None  # called with (steps done, steps in all)
    not_covered: tuple[str, ...] = ()  # sentences the report has to add
    records: int | None = None  # public number of records; None declares the true one public
    # chance of each record to take part in a step it was drawn for (sample weights); None: always
    weights: np.ndarray | None = None
    spent: tuple[Mechanism, ...] = ()  # what was released of the records before the fit, within the same budget
    # the columns as declared, before any kind was voted on: what is spent follows from these alone
    columns: tuple[Column, ...] | None = None
    ledger: Path | None = None  # file in which every release is counted before it happens, beside those of earlier fits
    past: tuple[Mechanism, ...] = ()  # what the ledger held before this fit; it counts in epsilon
    checkpoint: Checkpoint | None = None  # where an interrupted fit is found again

    @property
    def door(self) -> Door:
        """Where statistics of the records leave."""
        return Door(self.streams, self.ledger)

    def counted(self) -> FitPlan:
        """The plan with what its ledger holds already; where that is too much, raises before anything is read.

        Formal guarantees:
            What all runs on the ledger release, this fit included, is within epsilon.
        """
        if find_ranks().count > 1:  # every process would release statistics of its own
            raise ContractError("estimators train in one process: leave torch.distributed out, or use PrivacyEngine.")
        if self.ledger is None or (self.checkpoint is not None and self.checkpoint.begun):
            return self  # a run that goes on spends what it has planned for, and no more
        if isinstance(self.preprocessing, NonPrivateScaling):
            raise WeightclipError("NonPrivateScaling reads records without paying, which no ledger can count.")
        plan = replace(self, past=charged(self.ledger))
        spent = accounting.epsilon(plan.past, plan.delta, plan.accountant)
        if spent >= plan.epsilon * 0.99:
            raise BudgetSpent(
                f"ledger {self.ledger} holds epsilon {spent:.4g} at delta {plan.delta:g} already: nothing is left of "
                f"epsilon {plan.epsilon:g}. Raise epsilon, which is the total of all fits on one ledger."
            )
        return plan


def mu_left(plan: FitPlan) -> float:
    """1/σ of the one Gaussian mechanism that spends what is left of the budget."""
    return _mu_of(plan.epsilon, plan.delta, plan.accountant, plan.past)


@functools.lru_cache(maxsize=256)
def _mu_of(epsilon: float, delta: float, accountant: str, past: tuple[Mechanism, ...]) -> float:
    if not past:
        return accounting.gdp_mu(epsilon, delta)
    return 1 / accounting.calibrate_sigma(epsilon, delta, 1.0, 1, accountant, extra_mechanisms=past)
