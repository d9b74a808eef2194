"""Searches over a training function: what it pays for, what it refuses, what it keeps to itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from weightclip.accounting import NegativeBinomialRuns, search_cost
from weightclip.errors import WeightclipError
from weightclip.search import FunctionSearch, SearchRun, load_function
from weightclip.tabular import Drawn, mechanisms_of

torch.manual_seed(0)
X = torch.randn(400, 3)
Y = (X.sum(1) > 0).long()
DELTA = 1e-5


def pieces(run: SearchRun, **more):
    training, validation = run.split(len(X))
    model = nn.Linear(3, 2)
    return validation, run.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=run.uniform("lr", 0.1, 1.0, log=True)),
        data_loader=DataLoader(Subset(TensorDataset(X, Y), training), batch_size=32), criterion=nn.CrossEntropyLoss(),
        **more,
    )  # fmt: skip


def learn(model, optimizer, loader, loss, passes: int) -> None:
    for _ in range(passes):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()


def train(run: SearchRun) -> float:
    validation, made = pieces(run)
    print("a secret")
    learn(*made, run.passes)
    with torch.no_grad():
        return float((made[0](X[validation]).argmax(1) == Y[validation]).sum())


def plan(function=train, **settings) -> FunctionSearch:
    given = {"epsilon": 3.0, "delta": DELTA, "sample_rate": 0.1, "steps": 12, "mean_runs": 2.0, "seed": 3, **settings}
    return FunctionSearch(function, **given)


@pytest.fixture(scope="module")
def found():
    return plan().search()


def test_epsilon_is_that_of_the_whole_search(found):
    report = found[1]
    assert 2.9 < report["epsilon"] <= 3.0
    released = mechanisms_of(report)
    assert [m.steps for m in released] == [12, 1] and released[1].sigma == 10.0
    assert report["epsilon"] == pytest.approx(search_cost(released, DELTA, NegativeBinomialRuns(2.0)), rel=1e-6)
    assert report["public"]["steps"] == 12 and set(report["search"]) == {"mean_runs", "score"}
    assert 0.1 <= report["settings"]["lr"] <= 1.0


def test_it_learns_and_is_repeatable(found, capsys):
    weights, report = found
    right = ((X @ weights["weight"].T + weights["bias"]).argmax(1) == Y).float().mean()
    assert right > 0.8 and abs(report["search"]["score"] - 80) < 60
    again, other = plan().search()
    assert all(torch.equal(weights[k], again[k]) for k in weights) and other == report
    assert capsys.readouterr().out == ""  # what a run prints is a look at it


def test_runs_have_noise_of_their_own_one_split_and_candidates_that_differ(monkeypatch):
    seen = []

    def spy(run):
        seen.append((run.split(50), run._own.key("x"), run._own.is_secure, run.noise_multiplier))
        return train(run)

    monkeypatch.setattr(Drawn, "draw", classmethod(lambda cls, root, mean: cls(bytes(32), (b"a" * 32, b"b" * 32))))
    plan(spy, seed=None).search()
    (one, a, secure, noise), (two, b, *_) = seen
    assert one == two and a != b and secure and noise == plan().cost()
    assert sorted(one[0] + one[1]) == list(range(50))


def no_engine(run):
    return 1.0


def less_noise(run):
    run.noise_multiplier /= 2
    return train(run)


def more_steps(run):
    _, made = pieces(run)
    run.engine.budget = None
    learn(*made, run.passes + 1)
    return 1.0


def its_own_noise(run):
    pieces(run, noise_multiplier=0.1)
    return 1.0


@pytest.mark.parametrize(
    ("function", "said"),
    [(no_engine, "never called run.make_private"), (less_noise, "more than was paid for"),
     (more_steps, "more than was paid for"), (its_own_noise, "is the search's to set"),
     (lambda run: train(run) * math.nan, "every run"), (lambda run: train(run) and None, "every run")],
    ids=["no engine", "less noise", "more steps", "noise of its own", "a score that is no number", "no score"],
)  # fmt: skip
def test_functions_that_do_not_pay_are_refused(function, said):
    with pytest.raises(WeightclipError, match=said):
        plan(function).search()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"epsilon": -1.0}, "epsilon"), ({"sample_rate": 1.0}, "sampling rate"), ({"steps": 0}, "steps"),
     ({"mean_runs": 1.0}, "mean number"), ({"score_sigma": math.nan}, "noise of the score")],
    ids=["epsilon", "sample_rate", "steps", "mean_runs", "score_sigma"],
)  # fmt: skip
def test_impossible_searches_are_refused(wrong, said):
    with pytest.raises(WeightclipError, match=said):
        plan(**wrong)


def test_a_search_that_no_noise_pays_for_is_refused():
    with pytest.raises(WeightclipError, match="search less"):
        plan(epsilon=0.5, mean_runs=100.0, score_sigma=0.5).search()


def test_functions_are_found_by_their_place(tmp_path):
    (tmp_path / "own.py").write_text("def f(run):\n    return 1\n")
    assert load_function(f"{tmp_path}/own.py:f")(None) == 1
    for place, said in ((f"{tmp_path}/own.py:g", "no function"), (f"{tmp_path}/none.py:f", "no Python file")):
        with pytest.raises(WeightclipError, match=said):
            load_function(place)
