"""One-step audit of a whole fit, preprocessing included: everything it releases, on neighbouring tables, exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import weightclip.tabular._private as private
from weightclip.accounting._accounting import epsilon, gdp_epsilon
from weightclip.noise._release import Release
from weightclip.noise._streams import Streams
from weightclip.tabular._estimators import LipDPClassifier, LipDPRegressor

pd = pytest.importorskip("pandas")

RNG = np.random.default_rng(3)
N = 120


def table(n=N):
    return pd.DataFrame({
        "a": RNG.normal(50, 9, n), "b": RNG.lognormal(3, 2, n), "c": RNG.choice(["x", "y", "z"], n),
        "d": RNG.choice(["u", "v"], n), "e": RNG.random(n) < 0.4,
    })  # fmt: skip


BASE = table()
WORST = {
    "ordinary": {"a": 55.0, "b": 3.0, "c": "x", "d": "u", "e": True},
    "far away": {"a": 1e30, "b": -1e30, "c": "never seen before", "d": "w", "e": False},
    "missing": {"a": np.nan, "b": np.nan, "c": None, "d": None, "e": None},
    "infinite": {"a": np.inf, "b": -np.inf, "c": "x", "d": "u", "e": True},
}


class Tap:
    """Records the exact value of everything a fit releases, in units of its noise, and hands on fixed public values.

    What is released first may steer what is released later (adaptive composition): both neighbours get the releases of
    the first, so that each later query is the same function of the records.
    """

    def __init__(self, monkeypatch):
        self.script: list[np.ndarray] = []
        self.seen: list[np.ndarray] = []
        self.sigmas: list[float] = []
        tap = self

        def release(counts, touched, sigma, streams, label):
            tap.record(np.asarray(counts, dtype=float).ravel() / math.sqrt(touched), sigma)
            return tap.public(np.asarray(counts, dtype=float))

        monkeypatch.setattr(private, "release", release)
        real = Release.release

        def tapped(self, sensitivities, streams, step, factors=None, noise=None):
            scales = self.factors(sensitivities).tolist()
            sums = [
                t if t is not None else torch.zeros_like(b.parameter)
                for b, t in zip(self.blocks, self.sums, strict=True)
            ]
            relative = [t.double().flatten() / s * self.sigma for t, s in zip(sums, scales, strict=True)]
            tap.record(torch.cat(relative).numpy(), self.sigma)
            flat = tap.public(torch.cat([t.double().flatten() for t in sums]).numpy())
            parts = torch.from_numpy(flat).split([t.numel() for t in sums])
            self.sums = [t.view_as(old).to(old.dtype) for t, old in zip(parts, sums, strict=True)]
            # noise of a seeded run is keyed by the sums: both neighbours get that of the public ones
            return real(self, sensitivities, Streams.seeded(step), step, factors, noise)

        monkeypatch.setattr(Release, "release", tapped)

    def record(self, value, sigma):
        self.seen.append(value)
        self.sigmas.append(sigma)

    def public(self, value):
        place = len(self.seen) - 1
        if place == len(self.script):
            self.script.append(value.copy())
        return self.script[place].copy()

    def start(self):
        self.seen, self.sigmas = [], []


@pytest.mark.parametrize("kind", [LipDPClassifier, LipDPRegressor])
@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize("record", WORST)
def test_one_record_moves_no_release_by_more_than_the_claim(kind, hidden, record, monkeypatch):
    tap = Tap(monkeypatch)
    y = RNG.random(N + 1)
    y[-1] = 1e9
    y = (y > 0.5).astype(int) if kind is LipDPClassifier else y
    # q = 1 and a public n: what remains is the sensitivity of each release, without the help of sampling
    model = kind(epsilon=2.0, delta=1e-4, hidden_layer_sizes=hidden, batch_fraction=1.0, epochs=2, random_state=0,
                 accountant="rdp", n_records=N)  # fmt: skip
    without = table_with(None)
    with_it = table_with(WORST[record])
    releases = []
    for data, labels in ((without, y[:-1]), (with_it, y)):
        tap.start()
        model.fit(data, labels)
        releases.append((tap.seen, tap.sigmas))
    (first, sigmas), (second, again) = releases
    # kinds, ranges, categories, quantiles, means; a regressor's target has two more and a last look in two parts
    others, parts = (5, 0) if kind is LipDPClassifier else (8, 1)
    assert sigmas == again and len(first) == len(second) == others + parts + model.n_iter_
    shifts = [float(np.linalg.norm(a - b)) for a, b in zip(first, second, strict=True)]
    assert all(s <= 1 + 1e-6 for s in shifts), shifts
    if record == "ordinary":
        assert shifts[:4] == pytest.approx([1] * 4)  # the audit can see: preprocessing reaches its bound
    # the whole fit is one Gaussian mechanism; its exact epsilon must not exceed what the report says
    mu = math.sqrt(sum((s / sigma) ** 2 for s, sigma in zip(shifts, sigmas, strict=True)))
    assert gdp_epsilon(mu, model.delta_) <= model.epsilon_ * (1 + 1e-6)
    assert len(model.privacy_report_["mechanisms"]) == others + 1


def table_with(record):
    extra = [] if record is None else [pd.DataFrame([record])]
    return pd.concat([BASE, *extra], ignore_index=True).astype({"e": object, "c": object, "d": object})


def test_the_audit_finds_a_leak(monkeypatch):
    """With half the noise on the counts, the shift doubles and the claim is refuted."""
    tap = Tap(monkeypatch)
    honest = private.release
    monkeypatch.setattr(
        private,
        "release",
        lambda counts, touched, sigma, streams, label: honest(counts, touched / 4, sigma, streams, label),
    )
    model = LipDPClassifier(2.0, delta=1e-4, batch_fraction=1.0, epochs=1, random_state=0, accountant="rdp")
    seen = []
    for data in (table_with(None), table_with(WORST["ordinary"])):
        tap.start()
        model.fit(data, np.arange(len(data)) % 2)
        seen.append(tap.seen)
    assert max(float(np.linalg.norm(a - b)) for a, b in zip(seen[0][:3], seen[1][:3], strict=True)) > 1.9


def test_sampled_runs_cost_what_they_claim():
    """The accountant's figure for the very mechanisms of a report, composed the other way round."""
    model = LipDPClassifier(1.0, epochs=2, delta=1e-4, random_state=0).fit(BASE, np.arange(N) % 2)
    from weightclip.accounting._accounting import Mechanism

    listed = [Mechanism(m["kind"], m["sigma"], m["q"], m["steps"]) for m in model.privacy_report_["mechanisms"]]
    assert epsilon(listed[::-1], 1e-4) == pytest.approx(model.epsilon_, rel=1e-9)
