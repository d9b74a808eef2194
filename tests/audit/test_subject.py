"""Runs through the real engine: releases in units, data and weights exchanged in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.audit import Subject, subjects
from weightclip.audit._subject import joined, plain_copy, repeated


@pytest.fixture
def subject() -> Subject:
    return subjects()["radii on both factors"]


def test_noiseless_release_is_the_sum_of_the_records(subject: Subject):
    data = subject.ordinary(3)
    together = subject.start(data, 0.0).step()
    alone = sum(subject.start((data[0][i : i + 1], data[1][i : i + 1]), 0.0).step() for i in range(3))
    assert torch.allclose(together, alone, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]


def test_units_make_noise_standard_and_one_record_at_most_one(subject: Subject):
    data = subject.ordinary(1)
    run, quiet = subject.start(data, 3.0), subject.start(data, 0.0)
    noise = (run.step() - quiet.step()) / 3  # both at the initial weights
    assert noise.std() == pytest.approx(1.0, abs=0.3)
    release = quiet.step()
    assert release.norm() <= 1
    norms = quiet.layer_norms(release)
    sensitivities = wc.certify(quiet.model, None).sensitivities
    assert set(norms) == set(sensitivities) and all(norms[k] <= sensitivities[k] for k in norms)


def test_pieces_give_one_release(subject: Subject):
    data = subject.ordinary(7)
    whole, pieces = subject.start(data, 0.0), subject.start(data, 0.0, physical=3)
    assert torch.allclose(whole.step(), pieces.step(), rtol=1e-4, atol=1e-6)
    assert pieces.engine.steps == 1


def test_weights_and_records_can_be_exchanged(subject: Subject):
    run = subject.start(subject.ordinary(2, 0), 0.0)
    start = run.weights()
    first = run.step()
    run.set_weights(start)
    run.replace(subject.ordinary(2, 1))
    other = run.step()
    run.set_weights(start)
    run.replace(subject.ordinary(2, 0))
    assert torch.equal(run.step(), first) and not torch.allclose(other, first)


def test_subject_of_an_engine_and_plain_copies():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    engine = wc.PrivacyEngine()
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6), noise_multiplier=1.0,
    )  # fmt: skip
    subject = Subject.of(engine, "mine")
    records = subject.ordinary(4)
    assert records[0].shape == (4, 3) and all(any(torch.equal(r, s) for s in x) for r in records[0])
    twin = plain_copy(model)
    assert type(twin[0]) is nn.Linear and not twin._forward_hooks and not twin._forward_pre_hooks
    near = x / (2 * x.norm(dim=1, keepdim=True))  # where the projection does nothing
    assert torch.equal(twin(near), model(near))
    assert float(subject.start(records, 0.0).step().norm()) > 0
    with pytest.raises(wc.WeightclipError, match="make_private first"):
        Subject.of(wc.PrivacyEngine())


def test_records_are_joined_and_repeated_in_order():
    a, b = (torch.zeros(2, 1), torch.tensor([0, 1])), (torch.ones(1, 1), torch.tensor([1]))
    assert joined(a, b)[0].flatten().tolist() == [0, 0, 1] and joined(b, a)[1].tolist() == [1, 0, 1]
    assert repeated(a, 3)[1].tolist() == [0, 1, 0]
