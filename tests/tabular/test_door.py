"""The door of statistics: noise that meets one sum only, charges that come first."""

from __future__ import annotations

import numpy as np
import pytest

import weightclip.tabular._plan as plans
import weightclip.tabular._private as doors
import weightclip.tabular._private as private
from weightclip.accounting._ledger_format import read
from weightclip.errors import ContractError
from weightclip.noise._streams import Streams
from weightclip.tabular._estimators import LipDPClassifier
from weightclip.tabular._private import Door, charged

A, B = np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3) + 1


def test_noise_of_a_seed_repeats_for_one_sum_and_never_meets_another():
    door = Door(Streams.seeded(3))
    first = door.noise(A, 1.0, "x")
    assert np.array_equal(door.noise(A, 1.0, "x"), first) and first.shape == A.shape
    for other in (door.noise(B, 1.0, "x"), door.noise(A, 2.0, "x"), door.noise(A, 1.0, "y"), door.noise(A.T, 1.0, "x")):
        assert not np.isclose(np.sort(other.ravel()), np.sort(first.ravel())).any()


def test_secure_noise_is_fresh_every_time():
    door = Door(Streams.secure())
    assert not np.isclose(door.noise(A, 1.0, "x"), door.noise(A, 1.0, "x")).any()


def test_a_release_is_on_the_ledger_before_noise_is_drawn(tmp_path, monkeypatch):
    place, seen = tmp_path / "l", []
    real = Streams.for_release

    def drawn(self, number, content):
        seen.append((number, read(place).charges))
        return real(self, number, content)

    monkeypatch.setattr(Streams, "for_release", drawn)
    door = Door(Streams.seeded(0), place)
    for _ in range(3):
        private.release(A, 2.0, 4.0, door, "x")
    assert seen == [(0, 1), (1, 2), (2, 3)]
    assert sum(m.steps for m in charged(place)) == 3
    assert {(m.kind, m.sigma, m.q) for m in charged(place)} == {("gaussian", 4.0, 1.0)}


def forget_statistics(patch):
    patch.setattr(doors.Door, "charge", lambda self, mechanism: 0)


def forget_the_past(patch):
    patch.setattr(plans, "charged", lambda ledger: ())


@pytest.mark.parametrize("mutant", [forget_statistics, forget_the_past])
def test_a_fit_that_forgets_charges_does_not_train(mutant, tmp_path, monkeypatch):
    """Two deliberate bugs: the training finds a ledger that does not hold what the budget was computed from."""
    X = np.random.default_rng(0).uniform(-1, 1, (60, 2))
    settings = {"delta": 1e-5, "accountant": "rdp", "epochs": 1, "ledger": tmp_path / "l"}
    LipDPClassifier(1.0, **settings).fit(X, np.arange(60) % 2)
    mutant(monkeypatch)
    with pytest.raises(ContractError, match="charged by another run"):
        LipDPClassifier(3.0, **settings).fit(X, np.arange(60) % 2)
