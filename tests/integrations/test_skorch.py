"""skorch: fit, and what it prints."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.integrations.kit import DELTA, PRIVACY, net, table
from torch import nn

import weightclip as wc

skorch = pytest.importorskip("skorch", reason="skorch is missing: pip install weightclip[test-stock]")


def make(**options):
    from weightclip.integrations import PrivateNet

    class Net(PrivateNet, skorch.NeuralNetClassifier):
        pass

    settings = {"criterion": nn.CrossEntropyLoss, "optimizer": torch.optim.SGD, "lr": 0.5, "max_epochs": 3,
                "batch_size": 24, "train_split": None, "privacy": PRIVACY}  # fmt: skip
    return Net(net, **{**settings, **options})


def test_fit(capsys):
    records = table()
    x, y = (t.numpy() for t in records.tensors)
    model = make().fit(x, y)
    assert model.engine_.steps == 12 and 1.9 < model.engine_.get_epsilon(DELTA) <= 2.0
    history = model.history
    assert [row["epsilon"] for row in history] == sorted(row["epsilon"] for row in history) and len(history) == 3
    assert all(math.isnan(row["train_loss"]) for row in history)
    assert {b["train_batch_size"] for row in history for b in row["batches"]} == {24.0}
    assert "epsilon" in capsys.readouterr().out
    chances = model.predict_proba(x)
    torch.testing.assert_close(torch.as_tensor(chances).sum(1), torch.ones(len(x)))  # softmax, as skorch infers it
    first = model.module_
    model.fit(x, y)
    assert model.module_ is not first and model.engine_.steps == 12  # a run of its own


def test_what_is_not_private_is_refused():
    x, y = (t.numpy() for t in table().tensors)
    with pytest.raises(wc.ContractError, match="train_split"):
        make(train_split=skorch.dataset.ValidSplit(5)).fit(x, y)
    with pytest.raises(wc.ContractError, match="train_split"):
        make(train_split=lambda data, y=None, **_: (data, data)).fit(x, y)
    public = skorch.dataset.Dataset(x[:8], y[:8])
    assert make(train_split=skorch.helper.predefined_split(public), verbose=0).fit(x, y).engine_.steps == 12
    with pytest.raises(wc.ContractError, match="NLLLoss"):
        make(criterion=nn.NLLLoss).fit(x, y)


def test_weights_of_an_earlier_run_are_taken_up_only_with_a_ledger(tmp_path):
    from skorch.callbacks import Checkpoint, LoadInitState

    x, y = (t.numpy() for t in table().tensors)
    kept = Checkpoint(monitor=None, dirname=str(tmp_path / "kept"))
    with pytest.raises(wc.ContractError, match="how often it was released"):
        make(callbacks=[kept, LoadInitState(kept)], verbose=0).fit(x, y)
    counted = dataclasses.replace(PRIVACY, ledger=tmp_path / "run.ledger")
    assert make(callbacks=[kept, LoadInitState(kept)], verbose=0, privacy=counted).fit(x, y).engine_.steps == 12


def test_the_budget_ends():
    x, y = (t.numpy() for t in table().tensors)
    model = make(verbose=0).fit(x, y)
    with pytest.warns(UserWarning, match="budget spent"):
        model.partial_fit(x, y)
    assert model.engine_.steps == 12
    with pytest.raises(wc.ContractError, match="other records"):
        model.partial_fit(x.copy(), y)
