"""The text study in a tiny form: data, parts, methods, and a table that is chosen on dev and read on test once."""

from __future__ import annotations

import csv
import os

import numpy as np
import pytest
import torch
from tests import text_kit

from weightclip import WeightclipError
from weightclip.text import pooled
from weightclip_studies.text import (
    METHODS,
    Canaries,
    Full,
    Head,
    Jobs,
    Last,
    Lora,
    Prepared,
    Run,
    Settings,
    Study,
    Trial,
    figure,
    load_sst2,
    write,
)
from weightclip_studies.text import _opacus as opacus_module
from weightclip_studies.text import _training as training_module
from weightclip_studies.text._jobs import COLUMNS
from weightclip_studies.text._networks import LowRank
from weightclip_studies.text._prepared import LONGEST
from weightclip_studies.text._training import accuracy

PARTS = [Head(), Lora(rank=2), Last(), Full()]
SAMPLE = {("lora", "cap"), ("lora", "opacus"), ("full", "quantiles")}
SIZES = {"train": 256, "dev": 64, "test": 64}


@pytest.mark.parametrize("method", ["cap", "opacus", "non-private"])
def test_every_method_trains_in_half_precision(data, method):
    """autocast keeps its casts of weights: a loop that stayed inside one context would never train."""
    settings = Settings(method, 0.02, clip=1.0, batch=64, epochs=8, averaging=0.5)
    assert trained(data, Lora(rank=2), settings, precision=torch.bfloat16) > 0.9


def test_a_loop_inside_one_autocast_is_noticed(data, monkeypatch):
    """The mutant: the casts of the first step serve all others."""
    real = Run.scores

    def inside(self, ask):
        with torch.autocast("cpu", torch.bfloat16):
            return real(self, ask)

    monkeypatch.setattr(Run, "scores", inside)
    with pytest.raises(AssertionError):
        test_every_method_trains_in_half_precision(data, "non-private")


def trained(data: Prepared, part, settings: Settings, sigma: float = 0.0, seed: int = 0, **more) -> float:
    """Accuracy on the training part itself."""
    x, y = part.inputs(data, "train"), data.labels("train")
    return accuracy(Run(part.model(data, seed), x, y, settings, sigma, seed, **more).scores(x), y)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_every_part(data, part, method):
    if part.name != "head" and (part.name, method) not in SAMPLE and not os.environ.get("WEIGHTCLIP_FULL"):
        pytest.skip("all pairs run with WEIGHTCLIP_FULL=1")
    x, y = part.inputs(data, "train")[:96, :16], data.labels("train")[:96]
    head, found = part.name == "head", []
    settings = Settings(method, 0.05 if head else 0.02, 1.0, batch=32, epochs=10 if head else 4, averaging=0.5)
    for seed in range(5) if head and method == "quantiles" else (1,):  # quantiles of 32 records are noise of their own
        model = part.model(data, 0)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        marked = {k for k, p in model.named_parameters() if p.requires_grad}
        run = Run(model, x, y, settings, 0.0, seed=seed, piece=None if head else 24)
        found.append(float(accuracy(run.scores(x), y)))
        after = model.state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before if k not in marked)
        assert any(not torch.equal(before[k], after[k]) for k in marked)
    assert np.mean(found) > (0.8 if head else 0.6), found


def test_noise_is_as_large_as_asked(data):
    """With a multiplier of a thousand nothing is learnt, by ours and by Opacus alike."""
    for method in ("cap", "factors", "opacus"):
        settings = Settings(method, 0.01, 0.1, batch=64, epochs=4)
        scores = [trained(data, Head(), settings, 1000.0, seed) for seed in range(5)]
        assert 0.15 < float(np.mean(scores)) < 0.85, (method, scores)


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["single", "half"])
def test_both_ways_of_opacus_are_one(data, monkeypatch, precision):
    part, settings = Lora(rank=2), Settings("opacus", 0.01, 0.5, batch=32, epochs=1)
    x, y, found = data.tokens("train")[:64, :12], data.labels("train")[:64], []
    for most in (2**31, 0):
        monkeypatch.setattr(opacus_module, "_MOST", most)
        run = Run(part.model(data, 0), x, y, settings, 0.0, 0, precision=precision)
        assert opacus_module.is_ghost(run.model, 32) == (most == 0)
        found.append(run.scores(x))
    assert torch.allclose(*found, atol=1e-5 if precision is None else 0.1)


def test_the_plain_network_is_that_of_transformers(data, encoder):
    """Up to half precision of the stored weights, padding or not; a row of padding alone gives numbers."""
    model = Full().model(data, 0).eval()
    ids = data.tokens("dev")
    assert ids.shape == (SIZES["dev"], LONGEST)
    with torch.no_grad():
        assert torch.allclose(model(ids), model(ids[:, :12]), atol=1e-5)
        found = pooled(model.encoder(ids), ids != 0)
        assert torch.allclose(found, torch.from_numpy(encoder.features(text_kit.sentences(64, 1)[0])), atol=5e-3)
        assert torch.allclose(found, data.features("dev"), atol=5e-3)
        assert model(torch.zeros_like(ids[:2])).isfinite().all()


def test_files_that_are_missing_are_named(tmp_path):
    with pytest.raises(WeightclipError, match="tokens.npz is missing: weightclip-study text --prepare"):
        Prepared(tmp_path).labels("dev")


def test_a_low_rank_update_merges_into_one_layer():
    layer = LowRank(torch.nn.Linear(6, 5), 3, torch.Generator().manual_seed(0))
    x = torch.randn(4, 6)
    assert torch.equal(layer(x), layer.base(x))  # it starts from zero
    with torch.no_grad():
        layer.up.weight.normal_()
    assert torch.allclose(layer(x), layer.merged()(x), atol=1e-5)
    assert torch.allclose(layer.down.weight @ layer.down.weight.T, torch.eye(3), atol=1e-5)
    assert [k for k, p in layer.named_parameters() if p.requires_grad and k.startswith(("up", "down"))] == ["up.weight"]


def test_a_row_is_chosen_on_dev_and_reads_the_test_part_once(data, tmp_path):
    study = Study(data, tmp_path / "runs", epochs=2, batch=64)
    real, asked = study.run, []

    def watched(trial):
        asked.append(trial)
        return real(trial)

    study.run = watched  # type: ignore[method-assign]
    row = study.row(Head(), "cap", 3.0, 2, lambda line: None)
    assert row is not None and row["seconds"] == ""  # nothing was timed
    chosen = [trial for trial in asked if trial.on == "test"]
    assert [trial.seed for trial in chosen] == [0, 1] and len({trial.settings for trial in chosen}) == 1
    assert all(trial.on == "dev" and trial.seed == 1000 for trial in asked[:5]) and len(asked) == 7
    best = max(asked[:5], key=lambda trial: real(trial)["accuracy"])
    assert best.settings == chosen[0].settings and float(row["dev"]) == pytest.approx(real(best)["accuracy"], abs=1e-4)
    trials = (tmp_path / "runs" / "trials.jsonl").read_text()
    for until in (float("inf"), 0.0):
        again = Study(data, tmp_path / "runs", epochs=2, batch=64, until=until)
        assert again.row(Head(), "cap", 3.0, 2, lambda line: None) == row
    assert (tmp_path / "runs" / "trials.jsonl").read_text() == trials  # nothing was run twice
    assert again.row(Head(), "opacus", 3.0, 2, lambda line: None) is None  # no time is left


def test_every_private_method_has_as_many_trials(data, tmp_path):
    study = Study(data, tmp_path / "runs")
    for part in PARTS:
        tried = {len(study.grid(part, method)) for method in METHODS if method != "non-private"}
        assert tried == {{"head": 5, "lora": 1, "last": 2, "full": 2}[part.name]}
        passes = {m: {settings.epochs for settings in study.grid(part, m)} for m in ("cap", "opacus", "non-private")}
        assert passes["cap"] == passes["opacus"] == {8 if part.name in ("head", "lora") else 4}
        assert passes["non-private"] == {8 if part.name == "head" else 4}


def test_one_setting_is_not_tried_on_dev(data, tmp_path):
    study = Study(data, tmp_path / "runs", epochs=1, batch=64, length=12, records=64)
    study.noise.values[study.noise._key(8.0, 64, 64, 1)] = 0.5
    row = study.row(Lora(2), "cap", 8.0, 1, lambda line: None)
    assert row is not None and row["dev"] == "" and row["steps"] == 1
    assert len((tmp_path / "runs" / "trials.jsonl").read_text().splitlines()) == 1


def test_time_is_measured_apart(data, tmp_path, monkeypatch):
    monkeypatch.setattr(training_module, "WARM", 1)
    monkeypatch.setattr(training_module, "TIMED", 2)
    study = Study(data, tmp_path / "runs", epochs=2, batch=64)
    for method in ("non-private", "cap"):
        assert study.pace(Head(), method)["seconds"] > 0
    row = study.row(Head(), "cap", 8.0, 1, lambda line: None)
    assert float(row["seconds"]) > 0 and float(row["ratio"]) > 0 and row["peak_gib"] == ""


@pytest.mark.skipif(not os.environ.get("WEIGHTCLIP_FULL"), reason="runs with WEIGHTCLIP_FULL=1")
def test_trials_in_several_processes(data, tmp_path):
    study = Study(data, tmp_path / "runs", epochs=1, batch=64)
    trials = [Trial(Head(), settings, None, 0, "dev") for settings in study.grid(Head(), "non-private")]
    jobs = Jobs(study, 2)
    try:
        found = jobs([*trials, trials[0]])
    finally:
        jobs.close()
    assert found[:-1] == [study.run(trial) for trial in trials] and found[-1] == found[0]
    assert len((tmp_path / "runs" / "trials.jsonl").read_text().splitlines()) == len(trials)


def test_rows_of_a_file_are_replaced_and_others_kept(tmp_path):
    path = tmp_path / "sst2.csv"
    line = dict.fromkeys(COLUMNS, "0")
    write(path, [{**line, "part": "head", "method": "cap"}, {**line, "part": "lora", "method": "cap"}])
    write(path, [{**line, "part": "head", "method": "cap", "median": "1"}])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["part"], r["median"]) for r in rows] == [("head", "1"), ("lora", "0")]


def test_canaries_are_found_without_noise_and_hidden_by_it(data, tmp_path):
    """On records in many directions, which a head can learn by heart."""
    rng = np.random.default_rng(0)
    features = {name: rng.normal(size=(n, 128)).astype(np.float32) / 128**0.5 for name, n in SIZES.items()}
    np.savez(data.folder / "features.npz", **features)
    study, found = Study(data, tmp_path / "runs", records=32, batch=32), {}
    settings = Settings("cap", 0.2, 1.0, batch=32, epochs=60, averaging=0.5)
    for claimed, sigma in ((1.0, 30.0), (90.0, 0.05)):
        sizes = range(32, 97)
        keys = [study.noise._key(claimed, n, 32, settings.steps(n)) for n in sizes]
        study.noise.values.update(dict.fromkeys(keys, sigma))
        found[claimed] = Canaries(64).audit(study, Head(), settings, claimed)
    assert found[1.0].canaries == 48 and not found[1.0].violation
    assert found[90.0].epsilon_lower > 0.3 and found[90.0].mu > 1.0  # about 1 and 1.7; draws are of the system


def test_the_picture(tmp_path):
    line = {**dict.fromkeys(COLUMNS, "0"), "median": "0.8", "sem": "0.01", "epsilon": "3"}
    kinds = [("head", "cap", "3"), ("lora", "cap", "8"), ("lora", "opacus", "8"), ("lora", "non-private", "")]
    write(tmp_path / "x.csv", [{**line, "part": p, "method": m, "epsilon": e} for p, m, e in kinds])
    figure(tmp_path / "x.csv", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


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
