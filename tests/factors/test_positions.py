"""Norms over positions: Grams and products agree, in pieces as at once; what is stored does not grow with records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weightclip.factors import _dense, _embedding, _record_norms


def factors(places: int, width: int = 6, out: int = 5, records: int = 7) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(places)
    return torch.randn(records, places, width, generator=g), torch.randn(records, places, out, generator=g)


def hit(places: int, columns: int = 6, records: int = 7) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(places)
    return torch.randint(0, 5, (records, places), generator=g), torch.randn(records, places, columns, generator=g)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operator made, views and the results left out."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        new = isinstance(found, Tensor) and not any(r.alias_info for r in func._schema.returns)
        self.numbers = max(self.numbers, found.numel() if new else 0)
        return found


@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("places", [2, 3, 40])  # by Grams; about where ways change; by products
def test_both_ways_of_a_dense_layer_are_the_norm(places: int, beta: float) -> None:
    x, d = factors(places)
    exact = torch.einsum("rso,rsi->roi", d.double(), torch.cat([x, torch.full_like(x[..., :1], beta)], 2).double())
    want = exact.flatten(1).norm(dim=1)
    for grams in (False, True):
        got = _dense._over_positions(x, d, beta, torch.float64, grams).double()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0.0)
        assert bool((got >= want).all())
    torch.testing.assert_close(_dense.position_gram(x, d, beta).double(), want, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("skip", [None, 3])
@pytest.mark.parametrize("places", [2, 6, 40])
def test_both_ways_of_a_table_are_the_norm(places: int, skip: int | None) -> None:
    ids, d = hit(places)
    table = torch.zeros(7, 5, 6, dtype=torch.float64).scatter_add(1, ids[..., None].expand_as(d), d.double())
    if skip is not None:
        table[:, skip] = 0
    want = table.flatten(1).norm(dim=1)
    for grams in (False, True):
        got = _embedding._over_positions(ids, d, skip, torch.float64, grams).double()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-12)
        assert bool((got >= want).all())
    torch.testing.assert_close(_embedding.embedding_norm(ids, d, skip).double(), want, rtol=1e-5, atol=1e-12)


def test_the_way_with_less_work_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    for module in (_dense, _embedding):
        monkeypatch.setattr(module, "_over_positions", lambda *a: (taken.append(a[-1]), torch.zeros(7))[1])
    for places in (2, 3):  # 2 * 11 <= 30 < 3 * 11
        _dense.position_gram(*factors(places), 0.0)
    for places in (6, 7):
        _embedding.embedding_norm(*hit(places), None)
    assert taken == [True, False, True, False]


@pytest.mark.parametrize("places", [3, 6, 50])
@pytest.mark.parametrize("kind", ["dense", "table"])
def test_pieces_are_the_whole_and_small(kind: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "dense":
        x, d = factors(places, 12, 12, records=40)
        find, one = lambda x, d: _dense.position_gram(x, d, 0.3), places * 24 + max(2 * places**2, 144)  # noqa: E731
    else:
        x, d = hit(places, records=40)
        find, one = lambda x, d: _embedding.embedding_norm(x, d, 1), 2 * places * max(places + 6, 8)  # noqa: E731
    with Largest() as whole:
        want = find(x, d)
    for most in (4 * one, 1):  # four records at least; one by one
        monkeypatch.setattr(_record_norms, "MOST", most)
        with Largest() as pieces:
            got = find(x, d)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)
        assert pieces.numbers <= max(most, one)
    assert 10 * pieces.numbers < whole.numbers
    assert find(x[:0], d[:0]).shape == (0,)


def test_a_record_of_4096_positions_takes_no_square_of_them() -> None:
    x, d = torch.randn(2, 4096, 32), torch.randn(2, 4096, 32)
    with Largest() as found:
        _dense.position_gram(x, d, 1.0)
        _embedding.embedding_norm(torch.randint(0, 9, (2, 4096)), d, None)
    assert found.numbers <= 4 * x.numel() < 2 * 4096**2


@pytest.mark.parametrize("places", [2, 40])
def test_derivatives_agree(places: int) -> None:
    """Audits differentiate the norm."""
    x, d = factors(places)
    ids, e = hit(places)
    for way, first, second in (
        (lambda a, b, g: _dense._over_positions(a, b, 0.5, torch.float64, g), x, d),
        (lambda a, b, g: _embedding._over_positions(a, b, 2, torch.float64, g), ids, e),
    ):
        second = second.double().requires_grad_()
        one, two = (torch.autograd.grad(way(first, second, g).sum(), second)[0] for g in (False, True))
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
