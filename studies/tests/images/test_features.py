"""Features do not depend on the row that a record lies in, even where a sum starts at the row's address."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weightclip.errors import WeightclipError
from weightclip.nn import safe_normalise
from weightclip_studies.images import FeatureMap, FeatureSettings, _features, _whitening
from weightclip_studies.images._synthetic import strokes
from weightclip_studies.images._whitening import normalised, row_sums, unit

_FOUR = 16  # bytes: a GPU reads four numbers of float32 at a time, from addresses that are multiples of this


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100


def like_a_gpu(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Tensor.sum` over the last dimension in four lanes that begin at the first multiple of 16 bytes of the row.

    What lies before that address is added at the end, so the order of a row's sum follows from where the row begins.
    """

    def total(x: Tensor, *args: int, **options: bool) -> Tensor:
        if args not in ((-1,), (x.dim() - 1,)) or x.dtype != torch.float32 or not x.is_contiguous():
            return whole(x, *args, **options)
        rows, size = x.reshape(-1, x.shape[-1]), x.element_size()
        head = [-(i * rows.shape[1]) % (_FOUR // size) for i in range(len(rows))]  # the whole tensor is aligned
        out = torch.empty(len(rows))
        for i, (row, skip) in enumerate(zip(rows, head, strict=True)):
            body = row[skip:]
            lanes = torch.nn.functional.pad(body, (0, -len(body) % 4)).view(-1, 4)
            lane, left = torch.zeros(4), torch.zeros(())
            for four in lanes:
                lane = lane + four
            for number in row[:skip]:
                left = left + number
            out[i] = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + left
        out = out.view(x.shape[:-1])
        return out.unsqueeze(-1) if options.get("keepdim") else out

    return total


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "sum", like_a_gpu(torch.Tensor.sum))


@pytest.mark.parametrize("length", [1, 3, 7, 16, 147, 243])
def test_row_sums_are_sums(length: int) -> None:
    x = random(5, length)
    assert torch.allclose(row_sums(x).double(), x.double().sum(-1), rtol=0, atol=1e-5 * float(x.abs().sum(-1).max()))
    assert row_sums(x.view(1, 5, length)).shape == (1, 5)


@pytest.mark.parametrize("length", [3, 5, 7, 27, 147, 243])
def test_row_sums_do_not_depend_on_the_row(length: int, gpu: None) -> None:
    x = random(9, length)
    assert not torch.equal(x.sum(-1)[1:], x[1:].contiguous().sum(-1))  # plain sums do
    for first in range(1, 9):
        assert torch.equal(row_sums(x)[first:], row_sums(x[first:]))
    for make in (unit, lambda rows: normalised(rows, 1e-3)):
        assert torch.equal(make(x)[1:], make(x[1:]))


def test_normalised_is_safe_normalisation() -> None:
    x = torch.cat([random(4, 9, 147), torch.full((1, 9, 147), 7.0)])  # a constant image too
    assert torch.allclose(normalised(x, 1e-3), safe_normalise(x, 1e-3, (2,)), atol=1e-5)


def test_features_do_not_depend_on_the_row(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set whose groups have 147 numbers, and a mutant that adds rows as they lie."""
    whole = _features.dead_leaves
    monkeypatch.setattr(_features, "dead_leaves", lambda count, *a, **k: whole(min(count, 24), *a, **k))
    settings = FeatureSettings(patches=7, whiten=0.5, power=0.7, smooth=(1, 1, 0))
    images = torch.randint(0, 256, (4, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def differ() -> bool:
        made = FeatureMap(settings, (28, 28))
        return not torch.equal(made(images)[1:], made(images.roll(-1, 0))[:-1])  # passes of one size, a row further

    assert not differ()
    monkeypatch.setattr(_whitening, "row_sums", lambda x: x.sum(-1))
    monkeypatch.setattr(_features, "row_sums", lambda x: x.sum(-1))
    assert differ()


def test_the_stand_in_for_a_gpu_adds_up(gpu: None) -> None:
    for length, rows in itertools.product((1, 2, 6, 9), (1, 5)):
        x = random(rows, length, seed=length)
        assert torch.allclose(x.sum(-1).double(), torch.einsum("nl->n", x.double()), atol=1e-3)


def test_lines_are_bright_on_black_and_whiten_grey_images() -> None:
    made = strokes(64, 28, seed=1)
    assert made.shape == (64, 1, 28, 28) and float(made.min()) == 0 and float(made.max()) == 1
    assert torch.equal(made, strokes(64, 28, seed=1)) and not torch.equal(made, strokes(64, 28, seed=2))
    assert float(made[..., 0, 0].max()) == 0  # nothing in the corners
    shares = (made > 0.5).float().mean((1, 2, 3))
    assert 0.05 < float(shares.mean()) < 0.3
    plain, lines = (FeatureMap(FeatureSettings(whiten=1.0, lines=x), (28, 28)) for x in (False, True))
    images = (made[:8, 0] * 255).to(torch.uint8)
    one, other = plain(images), lines(images)
    assert not torch.allclose(one, other) and float(other.norm(dim=1).max()) <= 1 + 1e-5
    assert float(other.mean(0).norm()) < float(one.mean(0).norm())  # less is common to all
    assert "lines" not in plain.settings.to_dict() and lines.settings.to_dict()["lines"]
    with pytest.raises(WeightclipError, match="one plane"):
        FeatureMap(FeatureSettings(lines=True), (32, 32, 3))
