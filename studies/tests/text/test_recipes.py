"""Recipes of the text study: what they do to releases, what is paid for, and their table."""

from __future__ import annotations

import csv
import os

import numpy as np
import pytest
import torch

from weightclip.accounting import Mechanism, epsilon
from weightclip.noise import Streams
from weightclip_studies.text import (
    RECIPES,
    Head,
    Lora,
    Recipe,
    Run,
    Settings,
    Study,
    recipe_row,
    recipes_of,
    write_recipes,
)
from weightclip_studies.text import _recipes as recipes_module
from weightclip_studies.text import _warm as warm_module
from weightclip_studies.text._optimizer import NoisyAdam
from weightclip_studies.text._training import accuracy
from weightclip_studies.text._warm import class_means, cost

SAMPLE = ("AdamW without the noise's variance", "head started from class means", "both factors of the updates trained")

FULL = pytest.mark.skipif(not os.environ.get("WEIGHTCLIP_FULL"), reason="all recipes run with WEIGHTCLIP_FULL=1")


def moved(make, gradients: list[torch.Tensor]) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = make([weight])
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def test_without_noise_and_filter_it_is_adam():
    gradients = list(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)))
    ours = moved(lambda p: NoisyAdam(p, 0.1), gradients)
    assert torch.allclose(ours, moved(lambda p: torch.optim.Adam(p, lr=0.1), gradients), atol=1e-5)


def test_a_filter_keeps_what_stays_and_calms_what_does_not():
    constant = [torch.ones(3)] * 4
    plain = moved(lambda p: NoisyAdam(p, 0.1), constant)
    assert torch.allclose(moved(lambda p: NoisyAdam(p, 0.1, lowpass=0.9), constant), plain, atol=1e-6)


@pytest.mark.parametrize("lowpass", [0.0, 0.9], ids=["plain", "filtered"])
def test_the_noises_variance_is_taken_off_the_second_moment(lowpass):
    """What is left is the square of the signal, on average over many entries."""
    generator, weight = torch.Generator().manual_seed(0), torch.nn.Parameter(torch.zeros(20000))
    optimizer = NoisyAdam([weight], 0.0, noise=2.0, lowpass=lowpass)
    for t in range(1, 13):
        weight.grad = 0.5 + 2.0 * torch.randn(20000, generator=generator)
        optimizer.step()
        left = (float(optimizer.state[weight]["square"].mean()) - optimizer.expected) / (1 - 0.999**t)
        assert left == pytest.approx(0.25, abs=0.1)


def test_steps_are_longer_where_the_noise_is_taken_off():
    gradients = [0.5 + torch.randn(500, generator=torch.Generator().manual_seed(i)) for i in range(30)]
    ours, plain = (float(moved(lambda p, s=s: NoisyAdam(p, 0.1, noise=s), gradients).mean()) for s in (1.0, 0.0))
    assert ours < 2 * plain < 0


def sums_of(features: torch.Tensor, labels: torch.Tensor) -> tuple[np.ndarray, float]:
    """What is released, and what one record may move, squared."""
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_module, "release", lambda *a: seen.update(sums=a[0], touched=a[1]) or a[0])
        class_means(features, labels, 1.0, Streams.seeded(0))
    return seen["sums"], seen["touched"]


def check_one_record() -> None:
    generator, largest = torch.Generator().manual_seed(0), 0.0
    rows = torch.randn(40, 6, generator=generator) * torch.logspace(-3, 6, 40)[:, None]
    rows[3], rows[4], rows[5] = torch.nan, torch.inf, 1e30
    labels = torch.arange(40) % 2
    whole, touched = sums_of(rows, labels)
    for i in range(40):
        kept = torch.arange(40) != i
        without, _ = sums_of(rows[kept], labels[kept])
        assert np.isfinite(whole).all()
        change = float(np.square(whole - without).sum())
        assert change <= touched
        largest = max(largest, change / touched)
    assert largest > 0.99


def test_one_record_moves_the_means_no_further_than_is_paid_for():
    check_one_record()


@pytest.mark.parametrize("mistake", ["counts forgotten", "features not cut"])
def test_mistakes_about_the_means_are_found(monkeypatch, mistake):
    if mistake == "counts forgotten":
        monkeypatch.setattr(warm_module, "_ASIDE", 1.0)
    else:
        monkeypatch.setattr(warm_module, "_cut", lambda rows: np.minimum(rows, 2.0))
    with pytest.raises(AssertionError):
        check_one_record()


def test_a_head_starts_between_the_means(data):
    for part in (Head(), Lora(rank=2)):
        x, y, model = part.inputs(data, "train"), data.labels("train"), part.model(data, 0)
        settings = Settings("cap", 1e-9, batch=64, epochs=1, averaging=0.0, recipe=Recipe(warm=50.0))
        scores = Run(model, x, y, settings, 0.0, 0).scores(x)
        apart = scores[:, 1] - scores[:, 0]
        assert accuracy(scores, y) > 0.9
        assert float(apart[y == 1].mean() - apart[y == 0].mean()) == pytest.approx(2, abs=0.1)


def test_a_warm_start_is_paid_for(data, tmp_path):
    study = Study(data, tmp_path / "runs", epochs=1, batch=64)
    warm = Settings("cap", 0.1, batch=64, epochs=1, recipe=Recipe(warm=2.0))
    steps = Mechanism("gaussian", study.sigma(warm, 3.0), 64 / 256, warm.steps(256))
    assert epsilon([steps], 1e-5) < 2.9 < epsilon([steps, *cost(2.0)], 1e-5) <= 3.0


def test_trials_of_before_are_found_again():
    assert "recipe" not in Settings("cap", 0.1).told()
    assert Settings("cap", 0.1, recipe=Recipe(final=0.0)).told()["recipe"]["final"] == 0.0


def test_a_head_is_tried_with_what_changes_no_other_layers(data, tmp_path, monkeypatch):
    assert set(recipes_of(Lora())) == set(RECIPES) and "both factors of the updates trained" not in recipes_of(Head())
    monkeypatch.setattr(recipes_module, "_SEEDS", (1000,))
    study = Study(data, tmp_path / "runs", epochs=1, batch=32, records=128)
    study.noise.values[study.noise._key(8.0, 128, 32, 4)] = 0.01
    rows = [recipe_row(study, "plain", 8.0, part, lambda line: None) for part in (Head(), Head())]
    assert rows[0] == rows[1] and rows[0] is not None and float(rows[0]["rate"]) in (0.3, 1.0)
    write_recipes(tmp_path / "recipes.csv", [rows[0], {**rows[0], "part": "lora", "dev": "0.1000"}])
    with (tmp_path / "recipes.csv").open(newline="") as file:  # each part is compared with its own plain run
        assert [r["part"] + r["above_plain"] for r in csv.DictReader(file)] == ["head+0.0000", "lora+0.0000"]


@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=FULL) for n in RECIPES])
def test_every_recipe_runs_and_its_row_compares_it(data, tmp_path, monkeypatch, name):
    monkeypatch.setattr(recipes_module, "_SEEDS", (1000,))
    monkeypatch.setattr(recipes_module, "_RATES", {"head": (0.3,), "lora": (0.02,)})
    study = Study(data, tmp_path / "runs", epochs=1, batch=32, length=12, records=128)
    keys = {(b, e) for b in (32, 64, 128) for e in (1, 2)}
    for b, e in keys:  # any noise will do
        for beside in ("", "/50x1"):
            study.noise.values[study.noise._key(8.0, 128, b, e * max(1, round(128 / b))) + beside] = 0.01
    row = recipe_row(study, name, 8.0, Lora(rank=2), lambda line: None)
    assert row is not None and 0.3 < float(row["dev"]) <= 1.0
    other = {**row, "recipe": "plain", "dev": "0.5000"}
    write_recipes(tmp_path / "recipes.csv", [row])
    write_recipes(tmp_path / "recipes.csv", [other])
    with (tmp_path / "recipes.csv").open(newline="") as file:
        rows = {r["recipe"]: r for r in csv.DictReader(file)}
    assert float(rows["plain"]["above_plain"]) == 0.0
    if name != "plain":
        assert float(rows[name]["above_plain"]) == pytest.approx(float(row["dev"]) - 0.5, abs=1e-4)
    none = Study(data, tmp_path / "other", epochs=1, batch=32, until=0.0)
    assert recipe_row(none, name, 8.0, Lora(rank=2), lambda line: None) is None
