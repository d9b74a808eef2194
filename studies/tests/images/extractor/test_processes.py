"""Random processes: pictures by the seed alone, of the promised form, without a data set."""

from __future__ import annotations

import pytest
import torch

from weightclip_studies.images.extractor import Processes, contact_sheet, pictures
from weightclip_studies.images.extractor import _processes as processes
from weightclip_studies.images.extractor._draws import Draws

SMALL = Processes(size=24, leaves=12, chunk=8)


def test_pictures_repeat_by_their_seed() -> None:
    made = pictures(20, SMALL, seed=3)
    assert made.shape == (20, 3, 24, 24) and made.dtype is torch.uint8
    assert torch.equal(made, pictures(20, SMALL, seed=3))
    assert not torch.equal(made, pictures(20, SMALL, seed=4))
    assert torch.equal(made[:16], pictures(16, SMALL, seed=3))  # chunks have streams of their own
    assert len({bytes(image.flatten().tolist()) for image in made}) == 20


@pytest.mark.parametrize("generated", [0.0, 1.0])
def test_both_kinds_vary_within_and_between_pictures(generated: float) -> None:
    made = pictures(32, Processes(size=24, leaves=24, generated=generated, chunk=32), seed=0).float()
    assert float((made.flatten(1).std(1) > 3).float().mean()) > 0.9  # not flat
    assert float(made.mean((1, 2, 3)).std()) > 10  # of different brightness
    assert float((made - made.mean(1, keepdim=True)).abs().mean()) > 2  # of several colours


def test_a_size_that_no_power_of_two_divides() -> None:
    assert pictures(3, Processes(size=28, leaves=3), seed=0).shape == (3, 3, 28, 28)


def test_textures_are_standardised_and_differ_in_smoothness() -> None:
    made = processes.textures(64, 32, Draws("t", 0))
    assert torch.allclose(made.mean((1, 2)), torch.zeros(64), atol=1e-4)
    assert torch.allclose(made.square().mean((1, 2)), torch.ones(64), atol=1e-2)
    rough = (made[:, 1:] - made[:, :-1]).square().mean((1, 2))
    assert float(rough.max() / rough.min()) > 10


@pytest.mark.parametrize("kind, inside, outside", [
    (0.1, (0.6, 0.6), (0.8, 0.8)),  # ellipse: the unit circle
    (0.4, (0.8, 0.8), (1.1, 0.0)),  # rectangle
    (0.6, (-0.5, 0.0), (-0.7, 0.0)),  # triangle: flat on one side, pointed on the other
    (0.6, (1.1, 0.0), (0.9, 0.9)),
])  # fmt: skip
def test_shapes(kind: float, inside: tuple[float, float], outside: tuple[float, float]) -> None:
    def far(point: tuple[float, float]) -> float:
        u, v = (torch.tensor([[[c]]]) for c in point)
        zero = torch.zeros(2, 1, 1, 1)
        return float(processes._distance(u, v, torch.tensor([[[kind]]]), zero, zero))

    assert far(inside) < 1 < far(outside)


def test_numbers_drawn_on_the_cpu_are_the_same_for_every_purpose_but_another() -> None:
    assert torch.equal(Draws("a", 1).normal(4), Draws("a", 1).normal(4))
    assert not torch.equal(Draws("a", 1).normal(4), Draws("a", 2).normal(4))
    assert int(Draws("a").whole(3, 100).min()) >= 0 and int(Draws("a").whole(3, 100).max()) == 2


def test_a_sheet_shows_pictures_side_by_side(tmp_path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    made = pictures(9, SMALL, seed=0)
    path = contact_sheet(made, tmp_path / "a" / "sheet.png", columns=4)
    with image_module.open(path) as sheet:
        assert sheet.size == (96, 48)
        assert sheet.getpixel((24 + 5, 7)) == tuple(made[1, :, 7, 5].tolist())
