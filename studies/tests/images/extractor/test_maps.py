"""Learned features: unit vectors of one record each, whitened by synthetic pictures, joined by their share."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from weightclip.errors import WeightclipError
from weightclip_studies.images import FeatureMap, FeatureSettings, _features
from weightclip_studies.images._whitening import Whitening
from weightclip_studies.images.extractor import (
    PLACES,
    LearnedFeatures,
    LearnedSettings,
    Recipe,
    ResNet9,
    save_extractor,
)
from weightclip_studies.images.extractor import _maps as maps
from weightclip_studies.images.extractor._network import stage_widths

SHAPES = [(28, 28), (32, 32, 3)]


@pytest.fixture
def learned(tmp_path, monkeypatch) -> LearnedSettings:
    torch.manual_seed(0)
    monkeypatch.setenv(PLACES, str(tmp_path))
    whole = _features.dead_leaves
    monkeypatch.setattr(_features, "dead_leaves", lambda count, *a, **k: whole(min(count, 40), *a, **k))
    stored = [save_extractor(tmp_path, name, ResNet9(4), Recipe(width=4)) for name in ("one", "two")]
    return LearnedSettings(("one", "two"), tuple(s.sha256 for s in stored), pictures=48)


def private(shape: tuple[int, ...], count: int = 7, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=g)


def check_records_alone(settings: FeatureSettings, shape: tuple[int, ...]) -> None:
    """Codes of a record are the same, bit by bit, whatever the others are, wherever it lies, and if one is missing."""
    images = private(shape)
    codes = FeatureMap(settings, shape).codes(images, chunk=4)
    changed = images.clone()
    changed[0] = 255 - changed[0]
    changed[6] = 0
    assert torch.equal(FeatureMap(settings, shape).codes(changed, chunk=4)[1:6], codes[1:6])
    assert torch.equal(FeatureMap(settings, shape).codes(images[1:], chunk=4), codes[1:])
    feature_map = FeatureMap(settings, shape)
    feature_map.codes(changed, chunk=4)  # a map that has seen other records is the same map
    assert torch.equal(feature_map.codes(images.flip(0), chunk=4).flip(0), codes)
    assert feature_map.chunk_alone("cpu", chunk=4) == 4


@pytest.mark.parametrize("shape", SHAPES)
def test_features_of_a_record_do_not_depend_on_the_others(learned: LearnedSettings, shape: tuple[int, ...]) -> None:
    check_records_alone(FeatureSettings(scattering=0.0, learned=learned), shape)


def test_joined_features_of_a_record_do_not_depend_on_the_others(learned: LearnedSettings) -> None:
    check_records_alone(FeatureSettings(scattering=0.0, patches=8, flip=True, learned=learned), (32, 32, 3))


def whitened_by_the_pass(self: LearnedFeatures, x: torch.Tensor) -> list[torch.Tensor]:
    """Mutant: statistics of the records that are being encoded, as batch normalisation in training would take them."""
    found = real_maps(self, x)
    if hasattr(self, "white"):
        self.white = torch.nn.ModuleList(Whitening(m, self.settings.ridge) for m in found)
    return found


def whitened_by_the_first_pass(self: LearnedFeatures, x: torch.Tensor) -> list[torch.Tensor]:
    """Mutant: statistics of the first private records that come."""
    found = real_maps(self, x)
    if hasattr(self, "white") and not hasattr(self, "fitted"):
        self.white, self.fitted = torch.nn.ModuleList(Whitening(m, self.settings.ridge) for m in found), True
    return found


real_maps = LearnedFeatures._maps


@pytest.mark.parametrize("mutant", [whitened_by_the_pass, whitened_by_the_first_pass])
def test_whitening_by_private_images_is_noticed(learned: LearnedSettings, monkeypatch, mutant: Callable) -> None:
    monkeypatch.setattr(LearnedFeatures, "_maps", mutant)
    with pytest.raises(AssertionError):
        check_records_alone(FeatureSettings(scattering=0.0, learned=learned), (32, 32, 3))


def whitened_by_the_set(self: FeatureMap, images: torch.Tensor, chunk: int = 1000) -> torch.Tensor:
    """Mutant: before encoding a set, statistics are taken from all of it."""
    assert self.learned is not None
    found = self.learned._maps(images.float().movedim(-1, 1) / 255)
    self.learned.white = torch.nn.ModuleList(Whitening(m, 0.1) for m in found)
    return real_codes(self, images, chunk)


def centred_by_the_pass(self: FeatureMap, images: torch.Tensor, chunk: int = 1000) -> torch.Tensor:
    """Mutant: a pass centres its records."""
    return _features.encode(torch.cat([self(part) - self(part).mean(0) for part in images.split(chunk)]))


real_codes = FeatureMap.codes


@pytest.mark.parametrize("mutant", [whitened_by_the_set, centred_by_the_pass])
def test_statistics_of_a_private_set_are_noticed(learned: LearnedSettings, monkeypatch, mutant: Callable) -> None:
    monkeypatch.setattr(FeatureMap, "codes", mutant)
    with pytest.raises(AssertionError):
        check_records_alone(FeatureSettings(scattering=0.0, learned=learned), (32, 32, 3))


def test_every_pass_has_as_many_rows(learned: LearnedSettings, monkeypatch) -> None:
    sizes, feature_map = [], FeatureMap(FeatureSettings(scattering=0.0, learned=learned), (32, 32, 3))
    real = FeatureMap.forward
    monkeypatch.setattr(FeatureMap, "forward", lambda self, x: (sizes.append(len(x)), real(self, x))[1])
    assert len(feature_map.codes(private((32, 32, 3)), chunk=3)) == 7 and sizes == [3, 3, 3]


def test_passes_that_mix_records_become_single_ones(learned: LearnedSettings, monkeypatch) -> None:
    monkeypatch.setattr(LearnedFeatures, "_maps", whitened_by_the_pass)
    assert FeatureMap(FeatureSettings(scattering=0.0, learned=learned), (32, 32, 3)).chunk_alone("cpu", chunk=4) == 1


def test_the_whitening_is_made_of_synthetic_pictures(learned: LearnedSettings, monkeypatch) -> None:
    made, real = [], maps.pictures

    def watched(*args, **kwargs):
        made.append((args, real(*args, **kwargs)))
        return made[-1][1]

    monkeypatch.setattr(maps, "pictures", watched)
    block = LearnedFeatures(learned, (32, 32, 3))
    ((count, processes, seed, _), images) = made[0]
    assert (count, processes.size, seed) == (48, 32, learned.seed) and len(made) == 1
    with torch.no_grad():
        found = block._maps(images.float() / 255)
    assert [f.shape for f in found] == [(48, c, 4, 4) for c in stage_widths(4) * 2]
    for white, raw in zip(block.white, found, strict=True):
        rows = raw.movedim(1, -1).flatten(0, -2).double()
        assert torch.allclose(white.mean.double(), rows.mean(0), atol=1e-5)
        covariance = torch.cov(rows.t(), correction=0)
        want = covariance + learned.ridge * covariance.diagonal().mean() * torch.eye(len(covariance))
        matrix = white.matrix.double()
        assert torch.allclose(matrix @ want @ matrix, torch.eye(len(want), dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_learned_features_are_unit_vectors(learned: LearnedSettings, shape: tuple[int, ...]) -> None:
    images = private(shape)
    images[0] = 7
    out = FeatureMap(FeatureSettings(scattering=0.0, learned=learned), shape)(images)
    assert out.shape == (7, 2 * 15 * 4 * 16) and torch.isfinite(out).all()
    assert float(out.norm(dim=1).max()) <= 1 + 1e-5 and float(out.norm(dim=1).min()) > 0.99
    mirrored = FeatureMap(FeatureSettings(scattering=0.0, learned=learned), shape)(images.flip(2))
    assert torch.allclose(mirrored, out, atol=1e-5)


def test_blocks_are_joined_by_their_share(learned: LearnedSettings) -> None:
    shape, images = (32, 32, 3), private((32, 32, 3))
    both = FeatureMap(FeatureSettings(learned=learned), shape)(images)
    fixed = FeatureMap(FeatureSettings(), shape)(images)
    alone = FeatureMap(FeatureSettings(scattering=0.0, learned=learned), shape)(images)
    assert torch.allclose(both[:, : fixed.shape[1]], 0.3**0.5 * fixed, atol=1e-6)
    assert torch.allclose(both[:, fixed.shape[1] :], 0.7**0.5 * alone, atol=1e-6)
    with pytest.raises(WeightclipError, match="above 0"):
        FeatureMap(FeatureSettings(scattering=0.0), shape)(images)


def test_settings_survive_a_file_and_old_ones_are_told_as_before(learned: LearnedSettings) -> None:
    settings = FeatureSettings(patches=8, learned=learned)
    again = FeatureSettings(**json.loads(json.dumps(settings.to_dict())))
    assert again == settings and hash(again) == hash(settings) and settings.name == "scattering+patches+learned"
    assert "learned" not in FeatureSettings().to_dict()
    for wrong in ({"names": ()}, {"digests": ("x",)}, {"share": 0.0}):
        with pytest.raises(WeightclipError):
            LearnedSettings(**{"names": ("one", "two"), "digests": learned.digests, **wrong})


def test_other_weights_are_not_taken(learned: LearnedSettings) -> None:
    other = LearnedSettings(learned.names, learned.digests[::-1])
    with pytest.raises(WeightclipError, match="another one of this name"):
        FeatureMap(FeatureSettings(learned=other), (32, 32, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_too(learned: LearnedSettings, shape: tuple[int, ...]) -> None:
    settings = FeatureSettings(patches=8, whiten=1.0, learned=learned)
    assert FeatureMap(settings, shape, "cuda").chunk_alone("cuda", chunk=1000) == 1000
