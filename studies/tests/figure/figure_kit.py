"""Tools of the figure's tests: tiny pictures, and a driver whose runs are told apart without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weightclip_studies.figure import Cell, Figure, Recipe, _driver
from weightclip_studies.figure._train import Trained
from weightclip_studies.images._nets import Pictures

RECORDS = 200


def pictures(count: int = 80, planes: int = 1) -> Pictures:
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(0, 256, (count, planes, 8, 8), generator=generator).to(torch.uint8)
    return Pictures(x, torch.arange(count) % 10, False)


def fake_images(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures whose corner says of which part they are: 1 of the training part, 2 of the test part."""
    rng = np.random.default_rng(0)
    images = rng.integers(3, 255, (RECORDS, 8, 8)).astype(np.uint8)
    images[:, 0, 0] = 1 if part == "train" else 2
    images[:, 0, 1] = np.arange(RECORDS)
    return images, (np.arange(RECORDS) % 10).astype(np.uint8)


START = Cell("mnist", "joint", 3.0)
FIRST = START.recipe(START.start).learning_rate


class Answers(nn.Module):
    """Says of every record whether it is of the part that it is right on: the learning rate decides which part."""

    def __init__(self, recipe: Recipe, labels: Tensor, seen: list[tuple[str, tuple[int, ...]]]) -> None:
        super().__init__()
        self.right_on_test, self.labels, self.seen = recipe.learning_rate < FIRST, labels, seen

    def forward(self, x: Tensor) -> Tensor:
        pixels = (x * 64 + 127.5).round().long()
        is_test, number = pixels[:, 0, 0, 0] == 2, pixels[:, 0, 0, 1]
        self.seen.append(("test" if bool(is_test.all()) else "train", tuple(number.tolist())))
        right = is_test == self.right_on_test
        label = torch.where(right, self.labels[number], (self.labels[number] + 1) % 10)
        return nn.functional.one_hot(label, 10).float()


def follow(monkeypatch: pytest.MonkeyPatch, out: Path, **settings: Any) -> tuple[Figure, list, list]:
    """A driver on tiny pictures, the records each run was trained on, and those it was asked about."""
    monkeypatch.setattr(_driver, "load_images", fake_images)
    trained: list[tuple[str, tuple[int, ...]]] = []
    asked: list[tuple[str, tuple[int, ...]]] = []
    labels = torch.from_numpy(fake_images("mnist", "train")[1]).long()

    def train(data: Pictures, recipe: Recipe, sigma: float, seed: int, folder: Path, **rest: Any) -> Trained:
        kind = "test" if bool((data.x[:, 0, 0, 0] == 2).any()) else "train"
        trained.append((kind, tuple(data.x[:, 0, 0, 1].tolist())))
        return Trained(Answers(recipe, labels, asked), 0.5, recipe.steps, recipe.steps, 1.0, 1.0)

    monkeypatch.setattr(_driver, "train", train)
    figure = Figure(out, changes={"batch": 100, "steps": 2}, say=lambda line: None, **settings)
    figure.noise.values.update({f"{e}/{n}/100/2": 5.0 for e in (1, 3) for n in (180, RECORDS)})  # calibrating is slow
    return figure, trained, asked


def check_choice(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    """Settings are chosen by records of the training part that were not trained on; the test part is read once a seed.

    Learning rates below the first are right on the test part only, the others on the training part only: a driver that
    looks at the test part before the end chooses another one.
    """
    figure, trained, asked = follow(monkeypatch, out, trials=3, seeds=2)
    cell = Cell("mnist", "joint", 3.0)
    assert figure.make(cell)
    assert len(trained) == len(asked) == 5
    for (kind, fit), (judge, val) in zip(trained[:3], asked[:3], strict=True):
        assert kind == judge == "train" and not set(fit) & set(val) and len(fit) == 180 and len(val) == 20
    assert asked[0][1] == asked[1][1] == asked[2][1]  # one split for all
    assert [kind for kind, _ in trained[3:]] == ["train"] * 2 and all(len(rows) == RECORDS for _, rows in trained[3:])
    assert [kind for kind, _ in asked[3:]] == ["test"] * 2 and all(len(rows) == RECORDS for _, rows in asked[3:])
    finals = [r for r in figure.rows if r["stage"] == "final"]
    assert {r["recipe"]["learning_rate"] for r in finals} == {FIRST} and {r["accuracy"] for r in finals} == {0.0}
