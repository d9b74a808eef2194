"""Stock models train under the default kind of bounds, and release the clipped per-record gradients to 1e-5.

A sample runs always, all of them and the hostile records with WEIGHTCLIP_FULL=1.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.stock.kit import check, check_hostile
from tests.stock.models import HUGGING, PLAIN, made

FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"
SAMPLE = ("BERT", "GPT-2 LM", "ViT", "BERT with LoRA")
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


@pytest.mark.parametrize("name", [*PLAIN, *HUGGING])
def test_hostile_records(name: str, request: pytest.FixtureRequest) -> None:
    if not FULL and name not in ("LSTM", "two heads"):
        pytest.skip("all models run with WEIGHTCLIP_FULL=1")
    if name == "BERT with LoRA":
        pytest.importorskip("peft", reason="peft is not installed: pip install weightclip[test-stock]")
    check_hostile(made(name, None if name in PLAIN else request.getfixturevalue("lib")))
