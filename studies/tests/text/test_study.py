"""The text study in a tiny form: data, parts, methods, and a table that is chosen on dev and read on test once."""

from __future__ import annotations

import csv
import os

import numpy as np
import pytest
import torch
from tests import text_kit

from weightclip import WeightclipError
from weightclip_studies.text import Full, Head, Last, Lora, Sentences, Settings, Study, fit, load_sst2
from weightclip_studies.text._networks import LONGEST, LowRank
from weightclip_studies.text._study import COLUMNS, write
from weightclip_studies.text._training import METHODS, accuracy

PARTS = [Head(), Lora(rank=2), Last(), Full()]
SAMPLE = {("lora", "cap"), ("lora", "opacus"), ("full", "quantiles")}


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    return text_kit.install(tmp_path, monkeypatch)


def sentences(n: int, seed: int) -> Sentences:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, n)
    words = [["good", "charming"], ["bad", "dull"]]
    texts = [" ".join([*rng.choice(["film", "plot", "a", "the"], 3), *[rng.choice(words[1 - y])] * 3]) for y in labels]
    return Sentences(tuple(texts), labels)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_every_part(encoder, part, method):
    if part.name != "head" and (part.name, method) not in SAMPLE and not os.environ.get("WEIGHTCLIP_FULL"):
        pytest.skip("all pairs run with WEIGHTCLIP_FULL=1")
    data = sentences(96, 0)
    x, y = part.inputs(encoder, data), torch.from_numpy(data.labels)
    model = part.model(encoder, 0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trained = {k for k, p in model.named_parameters() if p.requires_grad}
    settings = Settings(method, 0.05, 1.0, batch=32, epochs=10 if part.name == "head" else 4, averaging=0.5)
    found = fit(model, x, y, x, settings, 0.0, seed=1, piece=None if part.name == "head" else 24)
    assert found.steps == settings.steps(96) and found.seconds > 0
    assert accuracy(found, data.labels) > (0.8 if part.name == "head" else 0.6)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if k not in trained)
    assert any(not torch.equal(before[k], after[k]) for k in trained)


def test_noise_is_as_large_as_asked(encoder):
    """With a multiplier of a thousand nothing is learnt, by ours and by Opacus alike."""
    part, data = Head(), sentences(256, 0)
    x, y = part.inputs(encoder, data), torch.from_numpy(data.labels)
    for method in ("cap", "factors", "opacus"):
        settings = Settings(method, 0.01, 0.1, batch=64, epochs=4)
        scores = [accuracy(fit(part.model(encoder, s), x, y, x, settings, 1000.0, s), data.labels) for s in range(5)]
        assert 0.15 < float(np.mean(scores)) < 0.85, (method, scores)


def test_padding_changes_nothing(encoder):
    data = sentences(8, 0)
    model = Full().model(encoder, 0).eval()
    ids = Full().inputs(encoder, data)
    assert ids.shape == (8, LONGEST)
    with torch.no_grad():
        assert torch.allclose(model(ids), model(ids[:, :12]), atol=1e-6)
        features = torch.from_numpy(encoder.features(data.texts))
        assert torch.allclose(model(ids), model.head(features), atol=1e-5)


def test_a_low_rank_update_merges_into_one_layer():
    layer = LowRank(torch.nn.Linear(6, 5), 3, torch.Generator().manual_seed(0))
    x = torch.randn(4, 6)
    assert torch.equal(layer(x), layer.base(x))  # it starts from zero
    with torch.no_grad():
        layer.up.weight.normal_()
    assert torch.allclose(layer(x), layer.merged()(x), atol=1e-5)
    assert torch.allclose(layer.down.weight @ layer.down.weight.T, torch.eye(3), atol=1e-5)
    assert [k for k, p in layer.named_parameters() if p.requires_grad and k.startswith(("up", "down"))] == ["up.weight"]


def test_a_row_is_chosen_on_dev_and_reads_the_test_part_once(encoder, tmp_path):
    study = Study(encoder, sentences(256, 0), sentences(64, 1), sentences(64, 2), tmp_path / "runs", epochs=2, batch=64)
    real, asked = study.run, []

    def watched(part, settings, epsilon, seed, on):
        asked.append((settings.method, on, seed, settings))
        return real(part, settings, epsilon, seed, on)

    study.run = watched  # type: ignore[method-assign]
    row = study.row(Head(), "cap", 8.0, range(2), lambda line: None)
    chosen = [a for a in asked if a[1] == "test" and a[0] == "cap"]
    assert [seed for _, _, seed, _ in chosen] == [0, 1] and len({s for *_, s in chosen}) == 1
    assert all(on == "dev" and seed == 1000 for _, on, seed, _ in asked[:8])
    best = max(real(Head(), settings, 8.0, 1000, "dev")["accuracy"] for *_, settings in asked[:8])
    assert float(row["dev"]) == pytest.approx(best, abs=1e-4)
    trials = (tmp_path / "runs" / "trials.jsonl").read_text()
    study.row(Head(), "cap", 8.0, range(2), lambda line: None)
    assert (tmp_path / "runs" / "trials.jsonl").read_text() == trials  # nothing was run twice


def test_rows_of_a_file_are_replaced_and_others_kept(tmp_path):
    path = tmp_path / "sst2.csv"
    line = dict.fromkeys(COLUMNS, "0")
    write(path, [{**line, "part": "head", "method": "cap"}, {**line, "part": "lora", "method": "cap"}])
    write(path, [{**line, "part": "head", "method": "cap", "median": "1"}])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["part"], r["median"]) for r in rows] == [("head", "1"), ("lora", "0")]


def test_the_data_set():
    try:
        parts = [load_sst2(split) for split in ("train", "dev", "test")]
    except WeightclipError as error:
        pytest.skip(str(error))
    assert [len(p) for p in parts] == [60614, 6735, 872]
    assert all(set(p.labels.tolist()) == {0, 1} for p in parts)
    with pytest.raises(WeightclipError, match="train, dev, test"):
        load_sst2("validation")


def test_a_changed_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "dev.tsv.gz").write_bytes(b"other")
    monkeypatch.setenv("WEIGHTCLIP_DATA", str(tmp_path))
    with pytest.raises(WeightclipError, match="SHA-256 differs"):
        load_sst2("dev")
