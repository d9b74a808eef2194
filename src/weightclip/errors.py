"""Errors of the library: one clear line each, saying what is wrong, where, and how to fix it."""

from __future__ import annotations


class WeightclipError(ValueError):
    """Base of every error weightclip raises on purpose."""


class CertificationError(WeightclipError):
    """The model cannot be certified: an operator has no rule, mixes records, or has no finite bound."""


class ContractError(WeightclipError, RuntimeError):
    """The training loop did something under which the guarantee would not hold."""


class NotFinite(ContractError):
    """A run came to numbers that are not finite: an event of its records and its noise, unlike other errors."""


class UncountedReleases(UserWarning):
    """A run was resumed without a ledger: nothing says how much was released after its checkpoint was saved."""


class BudgetSpent(ContractError):
    """The privacy budget is spent: no further step may be released."""
