"""Weights in files: half precision, digests checked."""

from __future__ import annotations

import json

import pytest
import torch

from weightclip.errors import WeightclipError
from weightclip_studies.images.extractor import (
    PLACES,
    Recipe,
    ResNet9,
    describe_extractor,
    load_extractor,
    save_extractor,
)
from weightclip_studies.images.extractor._weights import LARGEST, find_extractor, places


def test_weights_come_back_in_half_precision(tmp_path) -> None:
    torch.manual_seed(0)
    net = ResNet9(2)
    stored = save_extractor(tmp_path, "a", net, Recipe(width=2, seed=5), seconds=1.5)
    again = load_extractor(tmp_path, "a", stored.sha256)
    for mine, other in zip(net.parameters(), again.parameters(), strict=True):
        assert other.dtype is torch.float32 and torch.equal(mine.half().float(), other)
    assert describe_extractor(tmp_path, "a") == stored and stored.recipe.seed == 5 and stored.facts["seconds"] == 1.5
    assert json.loads((tmp_path / "a.json").read_text())["sha256"] == stored.sha256


def test_changed_weights_are_refused(tmp_path) -> None:
    save_extractor(tmp_path, "a", ResNet9(2), Recipe(width=2))
    path = tmp_path / "a.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightclipError, match="other weights"):
        load_extractor(tmp_path, "a")
    path.unlink()
    with pytest.raises(WeightclipError, match="is missing"):
        load_extractor(tmp_path, "a")
    with pytest.raises(WeightclipError, match="no extractor"):
        describe_extractor(tmp_path, "b")


def test_weights_that_do_not_fit_are_refused(tmp_path) -> None:
    net = ResNet9(2)
    next(net.parameters()).data.fill_(1e6)
    with pytest.raises(WeightclipError, match="half precision"):
        save_extractor(tmp_path, "a", net, Recipe(width=2))


def test_extractors_are_found_by_digest(tmp_path, monkeypatch) -> None:
    stored = save_extractor(tmp_path / "x", "a", ResNet9(2), Recipe(width=2))
    with pytest.raises(WeightclipError, match=PLACES):
        find_extractor("a", stored.sha256)
    monkeypatch.setenv(PLACES, str(tmp_path / "x"))
    assert find_extractor("a", stored.sha256).width == 2
    with pytest.raises(WeightclipError, match="another one"):
        find_extractor("a", "0" * 64)


def test_the_default_network_is_small_enough_for_the_repository() -> None:
    assert 2 * sum(p.numel() for p in ResNet9(Recipe().width).parameters()) < LARGEST


def test_committed_weights_have_their_digest(monkeypatch) -> None:
    monkeypatch.delenv(PLACES, raising=False)
    found = [path for folder in places() for path in folder.glob("*.json")]
    if not found:
        pytest.skip("no weights are committed")
    for path in found:
        load_extractor(path.parent, path.stem)
        assert path.with_suffix(".safetensors").stat().st_size <= LARGEST
