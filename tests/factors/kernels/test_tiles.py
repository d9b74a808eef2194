"""Weight gradients and exact norms by tiles of one record, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.triton_kit import kernel_device, run_interpreted
from torch import Tensor

from weightclip.factors._conv import patch_weights
from weightclip.factors.kernels import _tiles
from weightclip.factors.kernels._tiles import (
    POINT,
    Window,
    by_grams,
    fits_tiles,
    tile_additions,
    tile_group,
    tile_norms,
    tile_rounding,
    tile_sums,
)

CONVS = [  # records, in, out, size, window
    (3, 16, 8, (5, 6), Window((3, 3), (1, 1), (1, 1), (1, 1))),
    (2, 5, 20, (9, 8), Window((3, 2), (2, 1), (1, 0), (1, 2))),
    (4, 24, 130, (4, 4), Window((1, 1), (1, 1), (0, 0), (1, 1))),
    (2, 3, 7, (12, 11), Window((3, 3), (1, 1), (1, 1), (1, 1))),  # more positions than one tile is deep
]
DENSE = [(3, 16, 8, 7), (2, 130, 70, 20), (3, 130, 150, 9)]  # records, positions, in, out


@pytest.fixture
def interpreter() -> torch.device:
    return kernel_device()


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def cut(value: Tensor) -> Tensor:
    """float32 as TF32 operands: ten bits of the significand, towards zero."""
    return (value.view(torch.int32) & -8192).view(torch.float32) if value.dtype == torch.float32 else value


def conv_factors(case, dtype, device, seed=0):
    records, channels, out, size, window = case
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, channels, *size, generator=generator).to(dtype)
    shape = F.conv2d(x.float(), torch.zeros(out, channels, *window.kernel), None, *window[1:]).shape
    d = torch.randn(shape, generator=generator).to(dtype)
    return x.to(device), d.to(device), window


def gradients(x: Tensor, d: Tensor, window: Window) -> Tensor:
    """Exact gradient of each record's weight, in float64: (records, out, in, kernel)."""
    if x.dim() == 3:
        return torch.einsum("npo,npi->noi", cut(d).double(), cut(x).double())[..., None, None]
    weight = torch.zeros(d.shape[1], x.shape[1], *window.kernel, dtype=torch.float64, device=x.device)
    parts = [
        torch.ops.aten.convolution_backward(
            cut(e[None]).double(), cut(u[None]).double(), weight, None, *window[1:], False, (0, 0), 1,
            (False, True, False),
        )[1] for u, e in zip(x, d, strict=True)
    ]  # fmt: skip
    return torch.stack(parts)


def free(x: Tensor, d: Tensor, window: Window, beta: float = 0.0) -> Tensor:
    """Product of the norms of both factors."""
    if x.dim() == 3:
        squares, places = x.double().square().sum((1, 2)), x.shape[1]
    else:
        ones = torch.ones(1, x.shape[1], *window.kernel, dtype=torch.float64, device=x.device)
        energies = F.conv2d(x.double().square(), ones, None, *window[1:])
        squares, places = energies.sum((1, 2, 3)), energies[0].numel()
    return (squares + beta**2 * places).sqrt() * d.double().flatten(1).norm(dim=1)


def counts_of(x: Tensor, d: Tensor, window: Window) -> Tensor | None:
    if x.dim() == 3:
        return None
    return patch_weights(x, tuple(d.shape[2:]), window.kernel, window.stride, window.dilation, window.padding)


def positions(d: Tensor) -> int:
    return d.shape[1] if d.dim() == 3 else math.prod(d.shape[2:])


def cases(dtype, device):
    for case in CONVS:
        yield conv_factors(case, dtype, device)
    for records, places, channels, out in DENSE:
        generator = torch.Generator().manual_seed(0)
        x, d = (torch.randn(records, places, n, generator=generator).to(device, dtype) for n in (channels, out))
        yield x, d, POINT


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
def test_sums_are_those_of_scaled_gradients(dtype, last, interpreter):
    for x, d, window in cases(dtype, interpreter):
        if last and x.dim() == 4:
            x, d = (t.contiguous(memory_format=torch.channels_last) for t in (x, d))
        exact, room = gradients(x, d, window), tile_rounding(positions(d)) * free(x, d, window)
        for scale in (None, torch.rand(len(x), generator=torch.Generator().manual_seed(1)).to(interpreter)):
            found = tile_sums(x, d, scale, window)
            weight = torch.ones(len(x), device=interpreter) if scale is None else scale
            expected = (weight.double().view(-1, 1, 1, 1, 1) * exact).sum(0)
            assert found.dtype == torch.float64 and found.shape == expected.shape
            assert float((found - expected).norm()) <= float((weight * room).sum())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_records_with_scale_zero_add_exact_zeros(interpreter):
    zero_is_zero(interpreter)


def zero_is_zero(interpreter: torch.device) -> None:
    x, d = (torch.randn(3, 20, n).bfloat16().to(interpreter) for n in (6, 9))
    x[1], d[1] = float("nan"), float("inf")
    scale = torch.tensor([0.5, 0.0, 1.0], device=interpreter)
    keep = [0, 2]
    for group in (0, 16):
        found = tile_sums(x, d, scale, group=group)
        assert torch.equal(found, tile_sums(x[keep], d[keep], scale[keep], group=group))


@pytest.mark.parametrize("way", ["grams", "products"])
@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_exact_and_never_below(way, beta, dtype, interpreter, monkeypatch):
    for x, d, window in cases(dtype, interpreter):
        if way == "grams" and positions(d) > _tiles.WIDEST_GRAM:
            continue
        monkeypatch.setattr(_tiles, "by_grams", lambda *a: way == "grams")
        sums = d.double().sum(1) if d.dim() == 3 else d.double().sum((2, 3))
        exact = gradients(x, d, window).flatten(1).square().sum(1) + (beta * sums).square().sum(1)
        found = tile_norms(x, d, beta, window, counts_of(x, d, window)).double()
        assert bool((found >= exact.sqrt()).all())
        assert bool((found <= exact.sqrt() * 1.01 + 2e-3 * free(x, d, window, beta)).all())


@pytest.mark.parametrize("way", ["grams", "products"])
def test_norms_where_positions_cancel_are_not_below_what_is_formed(way, interpreter, monkeypatch):
    monkeypatch.setattr(_tiles, "by_grams", lambda *a: way == "grams")
    covers_what_is_formed(interpreter)


def covers_what_is_formed(interpreter: torch.device) -> None:
    """Positions that cancel but for rounding: the norm covers the sum as it is formed, not the exact one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, 24, generator=generator).bfloat16()
    d = torch.randn(4, 64, 40, generator=generator).bfloat16()
    x[:, 32:], d[:, 32:] = x[:, :32], -d[:, :32]
    x[:, 40] *= 1.0078125  # one position almost cancels
    x, d = x.to(interpreter), d.to(interpreter)
    formed = torch.stack([tile_sums(x[i : i + 1], d[i : i + 1], None) for i in range(4)]).flatten(1).norm(dim=1)
    found = tile_norms(x, d, 0.0)
    assert bool((found.double() >= formed).all())
    assert bool((found.double() <= formed + 0.01 * free(x, d, POINT)).all())


@pytest.mark.parametrize("way", ["grams", "products"])
def test_norms_hold_the_bias_of_cotangents_that_are_not_cut(way, interpreter, monkeypatch):
    """TF32 takes 2^-10 from every cotangent of a product; the bias adds them up as they are."""
    monkeypatch.setattr(_tiles, "by_grams", lambda *a: way == "grams")
    x, d = torch.full((1, 16, 4, 4), 2.0**-20), torch.full((1, 16, 4, 4), 1 + 2.0**-10 - 2.0**-23)
    x, d = x.to(interpreter), d.to(interpreter)
    found, sums = tile_norms(x, d, 1.0, Window(), counts_of(x, d, Window())), d.double().sum((2, 3))
    assert float(found) >= float(sums.norm())


@pytest.mark.parametrize("way", ["grams", "products"])
def test_positions_that_cancel_count_as_a_part_of_their_norms(way, interpreter, monkeypatch):
    monkeypatch.setattr(_tiles, "by_grams", lambda *a: way == "grams")
    least_part(interpreter)


def least_part(device: torch.device) -> None:
    x, d = (torch.ones(1, 16, 16, dtype=torch.bfloat16, device=device) for _ in range(2))
    d[:, 8:] = -1.0
    assert float(tile_norms(x, d, 0.0)) >= 2.0**-12 * 256 * (1 - 1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("way", ["grams", "products"])
def test_norms_of_records_that_are_not_finite_are_infinite(way, interpreter, monkeypatch):
    monkeypatch.setattr(_tiles, "by_grams", lambda *a: way == "grams")
    x, d = (torch.ones(5, 20, n, dtype=torch.bfloat16, device=interpreter) for n in (24, 40))
    x[0, 3, 1], d[1, 2, 2], x[2], x[3], d[3] = float("nan"), float("inf"), 1e25, 1e15, -1e15
    found = tile_norms(x, d, 1.0)
    assert torch.isinf(found[:3]).all() and bool((found > 0).all()) and torch.isfinite(found[4])
    assert float(found[3]) == math.inf or float(found[3]) >= 20 * math.sqrt(24 * 40) * 1e30


@pytest.mark.parametrize("way", ["grams", "products"])
def test_products_of_tiny_inputs_are_not_lost(way, interpreter, monkeypatch):
    monkeypatch.setattr(_tiles, "by_grams", lambda *a: way == "grams")
    x = torch.full((1, 16, 24), 1e-25, dtype=torch.bfloat16, device=interpreter)
    d = torch.full((1, 16, 40), 1e15, dtype=torch.bfloat16, device=interpreter)
    assert float(tile_norms(x, d, 0.0)) >= float(gradients(x, d, POINT).norm()) * (1 - 1e-6)


def moved_by_itself(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Adding one record moves the sum by that record's own product, up to float64 rounding: 8 of them or one."""
    generator = torch.Generator().manual_seed(3)
    x, d = (torch.randn(9, 130, n, generator=generator).to(device, dtype) for n in (5, 6))
    d[:8] *= 1000  # the others are much larger: float32 sums would swallow it
    scale = torch.rand(9, generator=generator).to(device)
    moved = tile_sums(x, d, scale) - tile_sums(x[:8], d[:8], scale[:8])
    alone = tile_sums(x[8:], d[8:], scale[8:])
    assert float((moved - alone).norm()) <= 1e-9 * float(alone.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("programs", [1, 264])
def test_a_record_adds_the_same_bits_whoever_else_is_there(dtype, programs, interpreter, monkeypatch):
    monkeypatch.setattr(_tiles, "_WAVES", programs)
    moved_by_itself(interpreter, dtype)


def rounding_pair(b: int, extra: bool) -> tuple[Tensor, Tensor]:
    """b (or b + 1) records of a one-weight layer over 16 positions, products at most 1, all of them bf16 numbers.

    Half of them bring the sum to a power of two, where the spacing of float32 doubles: the small ones that follow round
    one way below it and the other way above it, if the sum is float32 (as in tests/engine/test_engine_rounding.py).
    """
    u = b / 2 * 2.0**-24
    x, d = (torch.zeros(b // 2 + b // 6 * 3 + extra, 16, 1) for _ in range(2))
    x[:, :2] = 1.0
    d[: b // 2 + extra, 0] = 1.0
    d[b // 2 + extra - 1, 1] = -2 * u  # a second position: 1 - 2 u is no bf16 number
    d[b // 2 + extra :, 0, 0] = torch.tensor([1.25 * u, -0.625 * u, -0.625 * u]).repeat(b // 6)
    assert torch.equal(d, d.bfloat16().float())
    return x.bfloat16(), d.bfloat16()


def moves_by_one(b: int, device: torch.device) -> None:
    pairs = [[t.to(device) for t in rounding_pair(b, extra)] for extra in (False, True)]
    found = [float(tile_sums(x, d, torch.ones(len(x), device=device))) for x, d in pairs]
    assert abs(found[1] - found[0] - 1) < 1e-6
    total = torch.zeros(2)
    for i, (_, d) in enumerate(pairs):  # a float32 sum of the same products moves by more
        for value in d[:, :, 0].float().sum(1).cpu():
            total[i] += value
    assert float(total[1] - total[0]) - 1 > 1e-4


@pytest.mark.parametrize("b", [256, 16384])
def test_adversarial_rounding_of_sums_over_records(b, interpreter, monkeypatch):
    if b > 256 and interpreter.type == "cpu":
        pytest.skip("minutes in the interpreter; every record is one more turn of the same loop")
    monkeypatch.setattr(_tiles, "_WAVES", 1)
    moves_by_one(b, interpreter)


def in_groups(device: torch.device, group: int = 16, b: int = 256) -> None:
    """A pair built for float32 moves the sum by no more than what `sum_slack` allows for such groups."""
    x, d = (t.to(device) for t in rounding_pair(b, False))
    _, e = (t.to(device) for t in rounding_pair(b, True))
    y = torch.cat([x[:1], x])
    scale = torch.ones(len(y), device=device)
    found = [float(tile_sums(u, v, scale[: len(u)], group=group)) for u, v in ((x, d), (y, e))]
    assert abs(found[1] - found[0] - 1) <= 2 * tile_additions(group) * 2.0**-24 * len(y)


@pytest.mark.parametrize("group", [1, 16, 64])
def test_groups_move_by_no_more_than_their_additions_allow(group, interpreter):
    in_groups(interpreter, group)


def wide_group(device: torch.device) -> None:
    """Both halves of a program, several parts, positions more than one tile is deep."""
    generator = torch.Generator().manual_seed(5)
    for x_width, d_width, places in ((150, 130, 70), (24, 40, 130)):
        x, d = (torch.randn(5, places, n, generator=generator).bfloat16().to(device) for n in (x_width, d_width))
        scale = torch.rand(5, generator=generator).to(device)
        for group in (2, 16):
            found = tile_sums(x, d, scale, group=group)
            assert found.dtype == torch.float32
            exact = torch.einsum("n,npo,npi->oi", scale.double(), d.double(), x.double())
            norms = float((free(x, d, POINT) * scale.double()).sum())
            room = (tile_rounding(places) + tile_additions(group) * 2.0**-24) * norms
            assert float((found[:, :, 0, 0] - exact).norm()) <= room


def test_groups_of_records_in_float32(interpreter):
    wide_group(interpreter)


def test_groups_are_covered_by_the_slack_of_the_largest_draw():
    for b_max in (1, 30, 110, 1340, 2048):
        group = tile_group(b_max)
        assert group * b_max <= 2**15 and group >= 16
        assert 2 * tile_additions(group) * 2.0**-24 * b_max <= 0.01
    assert tile_group(2049) == tile_group(10**6) == tile_additions(0) == 0


def test_no_part_holds_more_rows_than_a_group(monkeypatch):
    parts_hold_groups(monkeypatch)


def parts_hold_groups(monkeypatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(_tiles, "_launch", lambda flat, scale, out, share, *rest: asked.append((share, len(out))))
    for records in (1, 17, 129, 400):
        x, d = torch.zeros(records, 16, 4), torch.zeros(records, 16, 8)
        for group in (1, 16, 100):
            tile_sums(x, d, None, group=group)
            share, parts = asked.pop()
            assert share <= group and share * parts >= records


@pytest.mark.parametrize("most", [2**27, 1])
def test_groups_that_would_not_fit_are_added_in_float64(most, monkeypatch):
    asked: list[tuple[bool, bool, torch.dtype]] = []

    def spy(flat, scale, out, share, parts, squares, grouped, how):
        asked.append((grouped, scale is None, out.dtype))
        out.zero_()

    monkeypatch.setattr(_tiles, "_launch", spy)
    monkeypatch.setattr(_tiles, "_ROOM", most)
    x, d = torch.zeros(40, 16, 4), torch.zeros(40, 16, 8)
    tile_sums(x, d, None, group=16)  # without scales a group has ones: Triton would add inside of products
    fits = most > 1
    assert asked == [(fits, not fits, torch.float32 if fits else torch.float64)]


@pytest.mark.parametrize("parts", [16, 17])
def test_many_parts_are_added_in_float64(parts, monkeypatch):
    """16 parts are what `tile_additions` counts."""
    assert tile_additions(5) == 5 + 16 + 1

    def spy(flat, scale, out, *rest):
        out.fill_(1.0)
        out[0] = 2.0**24

    monkeypatch.setattr(_tiles, "_launch", spy)
    x, d = torch.zeros(parts, 16, 4), torch.zeros(parts, 16, 8)
    found = tile_sums(x, d, None, group=1)
    exact = 2.0**24 + parts - 1
    assert found.dtype == (torch.float32 if parts <= 16 else torch.float64)
    assert parts <= 16 or bool((found == exact).all())


def test_grams_count_every_summand():
    flat = _tiles._flat(torch.zeros(2, 80, 300), torch.zeros(2, 80, 200), POINT)
    _, share = grams_share(flat)
    assert share >= (300 + 200) * _tiles.UNIT


def grams_share(flat):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tiles, "launch", lambda *args, **options: None)
        patch.setattr(_tiles, "_kernels", lambda: SimpleNamespace(grams=None))
        return _tiles._grams(flat, 0.0)


def test_what_fits():
    x = torch.zeros(2, 32, 4)
    assert not fits_tiles(x, x, 32, convolution=False)  # no GPU
    assert by_grams(64, 2304, 256) and not by_grams(1024, 576, 64) and not by_grams(129, 10**6, 10**6)
