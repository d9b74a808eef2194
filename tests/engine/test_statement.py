"""The statement for outsiders follows from the report alone, and says every number of it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.engine._statement import nist_answers, registry_entry


@pytest.fixture(scope="module")
def report():
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    model = nn.Linear(4, 2)
    engine = wc.PrivacyEngine()
    model, optimizer, loader, criterion = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=DataLoader(data, batch_size=8),
        criterion=nn.CrossEntropyLoss(), target_epsilon=2.0, target_delta=1e-5, epochs=1,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return engine.report()


def test_every_question_has_an_answer_with_the_numbers_of_the_report(report):
    answers = nist_answers(report)
    assert all(answers.values()) and len(answers) >= 10
    text = " ".join(answers.values())
    assert f"epsilon = {report['epsilon']:.6g}, delta = 1e-05" in text
    (mechanism,) = report["mechanisms"]
    assert f"noise multiplier {mechanism['sigma']:.6g}, sampling rate 0.125, 8 times" in text
    assert all(line in text for line in report["not_covered"])
    assert "operating system" in answers["Which randomness?"]
    assert "seed" in nist_answers({**report, "secure_noise": False})["Which randomness?"]
    replaced = nist_answers({**report, "adjacency": "REPLACE_ONE"})
    assert "differ in one record" in replaced["What is the unit of privacy?"]


def test_the_registry_entry_has_the_registry_s_fields(report):
    entry = json.loads(json.dumps(registry_entry(report, name="Income", data_curators=["us"])))
    deployment = entry["deployment"]
    assert set(deployment) == {"product", "dp_flavor", "privacy_loss", "model", "accounting", "implementation"}
    assert deployment["product"]["name"] == "Income" and deployment["product"]["intended_use"] == "to be filled in"
    assert deployment["privacy_loss"]["privacy_parameters"] == {"epsilon": report["epsilon"], "delta": 1e-5}
    assert deployment["dp_flavor"]["name"] == "Approximate DP"


def test_what_is_not_private_says_so(report):
    endless = {**report, "epsilon": "inf", "delta": 1e-5}
    assert "epsilon = inf" in nist_answers(endless)["What is the privacy guarantee?"]
    assert "epsilon" not in registry_entry(endless)["deployment"]["privacy_loss"]["privacy_parameters"]
    assert not math.isinf(report["epsilon"])


def test_an_estimator_s_report_is_understood_too():
    model = wc.LipDPClassifier(epsilon=3.0, delta=1e-4, random_state=0, epochs=2, feature_bounds=(0, 1), classes=[0, 1])
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 3, generator=generator).numpy()
    answers = nist_answers(model.fit(x, (x[:, 0] > 0.5).astype(int)).privacy_report_)
    assert all(answers.values()) and "seed" in answers["Which randomness?"]
