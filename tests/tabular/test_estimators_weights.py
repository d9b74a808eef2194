"""Sample weights, sparse tables and targets of several columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from weightclip.errors import WeightclipError
from weightclip.losses import BCEWithLogits, CrossEntropy, Loss
from weightclip.noise._streams import Streams
from weightclip.tabular import _inputs as shapes
from weightclip.tabular._estimators import LipDPClassifier, LipDPRegressor
from weightclip.tabular._training import thinned

RNG = np.random.default_rng(0)
N = 3000
X = RNG.uniform(-1, 1, (N, 2))
QUICK = {"epsilon": 4.0, "delta": 1e-5, "accountant": "rdp", "random_state": 0, "feature_bounds": (-1, 1)}


def contributions(weights, steps: int, kind: str = "binary") -> np.ndarray:
    """How often each record contributes, and that it contributes all of its gradient or nothing."""
    w = torch.tensor(weights, dtype=torch.float64)
    labels = torch.arange(len(w)) % 2
    loss: Loss = CrossEntropy()
    z = torch.full((len(w), 1 if kind == "binary" else 3), 0.3)
    if kind == "binary":
        loss, labels = BCEWithLogits(), labels.float()
    plain = loss.gradient(z, labels)
    counts = np.zeros(len(w))
    for step in range(steps):
        g = loss.gradient(z, thinned(labels, w, Streams.seeded(0).numpy("test", step)))
        kept = (g == plain).all(1)
        assert bool((kept | (g == 0).all(1)).all())
        counts += kept.numpy()
    return counts


def test_a_weight_is_the_chance_to_contribute() -> None:
    counts = contributions([1.0, 0.5, 0.1, 0.0], 4000) / 4000
    assert counts == pytest.approx([1.0, 0.5, 0.1, 0.0], abs=0.03)


@pytest.mark.parametrize(
    "weight, expected", [(1e300, 1), (math.inf, 1), (7, 1), (-1, 0), (-math.inf, 0), (math.nan, 0)]
)
@pytest.mark.parametrize("kind", ["binary", "classes"])
def test_no_weight_makes_a_record_count_more_than_once(weight, expected, kind) -> None:
    """The guarantee: a draw's gradient, never a multiple of it, and no error that depends on a weight."""
    assert contributions([weight, 1, 1, 1], 20, kind).tolist() == [20 * expected, 20, 20, 20]


def test_weights_are_used_and_reported() -> None:
    """Labels of the second half are wrong, and hardly count."""
    y = X[:, 0] > 0
    y[N // 2 :] = ~y[N // 2 :]
    y[0], y[1] = True, False
    weights = np.where(np.arange(N) < N // 2, 1.0, 0.02)
    model = LipDPClassifier(**QUICK).fit(X, y, sample_weight=weights)
    assert model.score(X, X[:, 0] > 0) > 0.9
    assert any("sample weights count as part" in s for s in model.privacy_report_["not_covered"])
    assert model.epsilon_ == LipDPClassifier(**QUICK).fit(X, y).epsilon_  # they neither cost nor save epsilon
    target = np.where(np.arange(N) < N // 2, X[:, 0], -1.0)
    regressor = LipDPRegressor(**QUICK, target_bounds=(-1, 1))
    plain = regressor.fit(X, target).score(X, X[:, 0])
    assert regressor.fit(X, target, sample_weight=list(weights)).score(X, X[:, 0]) > max(0.3, plain + 0.3)


def test_weights_that_are_not_one_number_each() -> None:
    y = X[:, 0] > 0
    for bad in (np.ones(N - 1), np.ones((N, 2)), 0.5):
        with pytest.raises(WeightclipError, match="sample_weight"):
            LipDPClassifier(**QUICK, epochs=1).fit(X, y, sample_weight=bad)
    odd = np.ones(N, dtype=object)
    odd[3], odd[4] = "heavy", 10**400  # each keeps its own record out; an error would tell
    LipDPClassifier(**QUICK, epochs=1).fit(X, y, sample_weight=odd)


@pytest.mark.parametrize("kind", [sp.csr_matrix, sp.csc_array, sp.coo_matrix])
def test_sparse_tables_are_written_out(kind) -> None:
    dense = np.where(RNG.random((N, 2)) < 0.5, 0.0, X)
    y = dense[:, 0] > 0
    a = LipDPClassifier(**QUICK, epochs=3).fit(kind(dense), y)
    b = LipDPClassifier(**QUICK, epochs=3).fit(dense, y)
    assert np.array_equal(a.predict_proba(kind(dense)), b.predict_proba(dense))


def test_sparse_tables_beyond_memory_are_refused() -> None:
    huge = sp.csr_matrix((10**6, 10**5))
    with pytest.raises(WeightclipError, match="745 GiB written out"):
        shapes.dense(huge)


@pytest.mark.parametrize(
    "y", [np.zeros((N, 3), int), sp.csr_matrix((N, 3)), [[0, 1, 1]] * N], ids=["array", "sparse", "list"]
)
def test_several_targets_are_refused_with_a_way(y) -> None:
    for kind in (LipDPClassifier, LipDPRegressor):
        with pytest.raises(WeightclipError, match="epsilon/3 and delta/3") as caught:
            kind(**QUICK).fit(X, y)
        assert "\n" not in str(caught.value)
