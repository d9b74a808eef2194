"""A tiny encoder and prepared sentences, for all tests of the text study."""

from __future__ import annotations

import shutil

import pytest
from tests import text_kit

from weightclip_studies.text import Prepared, Sentences, prepare

SIZES = {"train": 256, "dev": 64, "test": 64}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield text_kit.install(tmp_path_factory.mktemp("encoder"), patch)


@pytest.fixture(scope="module")
def prepared(encoder, tmp_path_factory) -> Prepared:
    parts = {name: Sentences(*text_kit.sentences(n, seed)) for seed, (name, n) in enumerate(SIZES.items())}
    return prepare(tmp_path_factory.mktemp("prepared"), encoder, parts)


@pytest.fixture
def data(prepared, tmp_path) -> Prepared:
    """A copy for each test: some change it."""
    return Prepared(shutil.copytree(prepared.folder, tmp_path / "prepared"))
