"""Stock models train under the default kind of bounds, and release the clipped per-record gradients to 1e-5.

A sample runs always, all of them and the hostile records with WEIGHTCLIP_FULL=1.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.oracle import trainable
from tests.stock.kit import RECORDS, Records, check, check_hostile
from tests.stock.models import HUGGING, PLAIN, made
from torch import nn
from torch.utils.data import DataLoader

import weightclip as wc

FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"
SAMPLE = ("BERT", "GPT-2 LM", "ViT")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the libraries, which warn of each other's releases
]


@pytest.fixture(scope="module")
def lib() -> Any:
    return pytest.importorskip("transformers", reason="transformers is missing: pip install weightclip[test-stock]")


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models(name: str) -> None:
    check(made(name))


@pytest.mark.parametrize("name", HUGGING)
def test_models_of_transformers(name: str, lib: Any) -> None:
    if not FULL and name not in SAMPLE:
        pytest.skip("all models run with WEIGHTCLIP_FULL=1")
    if name == "BERT with LoRA":
        pytest.importorskip("peft", reason="peft is not installed: pip install weightclip[test-stock]")
    check(made(name, lib))


@pytest.mark.parametrize("name", ["T5", "BERT"])
def test_a_mask_that_hides_nothing(name: str, lib: Any) -> None:
    """Libraries leave such a mask out, which is another way through the model than random masks take."""
    case = made(name, lib)
    case.inputs["attention_mask"] = torch.ones_like(case.inputs["attention_mask"])
    check(case)


@pytest.mark.parametrize("name", [*PLAIN, *HUGGING])
def test_hostile_records(name: str, request: pytest.FixtureRequest) -> None:
    if not FULL and name != "two heads":
        pytest.skip("all models run with WEIGHTCLIP_FULL=1")
    if name == "BERT with LoRA":
        pytest.importorskip("peft", reason="peft is not installed: pip install weightclip[test-stock]")
    check_hostile(made(name, None if name in PLAIN else request.getfixturevalue("lib")))


def test_a_merged_adapter_is_the_trained_model(lib: Any) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install weightclip[test-stock]")
    case = made("BERT with LoRA", lib)
    model: Any = case.model
    before = {name: p.detach().clone() for name, p in trainable(model).items() if "lora_" in name}
    engine = wc.PrivacyEngine()
    _, optimizer, loader, criterion = engine.make_private(
        module=model, optimizer=torch.optim.SGD(list(trainable(model).values()), 1.0), noise_multiplier=1.0,
        data_loader=DataLoader(Records(case, list(range(RECORDS))), batch_size=4), criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    for batch in loader:
        target = batch.pop("labels")
        optimizer.zero_grad()
        criterion(model(**batch), target).backward()
        optimizer.step()
    engine.detach()
    model.eval()
    assert before and all(not torch.equal(p, before[n]) for n, p in trainable(model).items() if n in before)
    with torch.no_grad():
        want = model(**case.inputs).logits
        with model.disable_adapter():
            without = model(**case.inputs).logits
        got = model.merge_and_unload()(**case.inputs).logits
    assert float((want - without).abs().max()) > 1e-2  # the adapter does something: equality below is no accident
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
