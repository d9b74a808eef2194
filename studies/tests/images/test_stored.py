"""Codes on disk: the same as without, in shards that several processes share, resumed after a kill."""

from __future__ import annotations

import pytest
import torch

from weightclip_studies.images import _stored
from weightclip_studies.images._features import FeatureMap, FeatureSettings
from weightclip_studies.images._stored import StoredCodes


@pytest.fixture
def feature_map(monkeypatch: pytest.MonkeyPatch) -> FeatureMap:
    monkeypatch.setattr(_stored, "_SHARD", 8)
    return FeatureMap(FeatureSettings(groups=9), (28, 28))


def test_shards_are_made_once_and_give_the_same_codes(tmp_path, feature_map, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (21, 28, 28), generator=generator).to(torch.uint8)
    labels = torch.arange(21) % 10
    plain = feature_map.encode(images, labels, 4)
    store = StoredCodes(feature_map, tmp_path / "codes")

    def stop() -> None:
        if len(list((tmp_path / "codes").glob("*.npy"))) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.features("train", images, labels, 4, stop)
    made = []
    codes = FeatureMap.codes
    monkeypatch.setattr(FeatureMap, "codes", lambda self, *a: (made.append(1), codes(self, *a))[1])
    found = store.features("train", images, labels, 4)
    assert len(made) == 1 and torch.equal(found.codes, plain.codes) and torch.equal(found.norms, plain.norms)
    assert torch.equal(store.features("train", images, labels, 4).labels, plain.labels) and len(made) == 1
    assert sorted(path.name for path in (tmp_path / "codes").iterdir()) == [
        "train-000000-000008.npy", "train-000008-000016.npy", "train-000016-000021.npy",
    ]  # fmt: skip
    assert len(store.features("test", images[:5], labels[:5], 4)) == 5 and len(made) == 2
