"""Tiles that read plain tensors (N, C, H, W) as they lie, against float64 gradients of single records."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from tests.factors.kernels.test_tiles import (
    conv_factors,
    counts_of,
    cut,
    free,
    gradients,
    kernel_device,
    positions,
    rounding_pair,
    run_interpreted,
)
from torch import Tensor

from weightclip.factors.kernels import _tiles
from weightclip.factors.kernels._tiles import Window, tile_additions, tile_norms, tile_rounding, tile_sums

SAME = Window((3, 3), (1, 1), (1, 1))
UNCUT = 1 + 2.0**-10 - 2.0**-23  # TF32 cuts it to 1
FIXED = [  # records, in, out, size, window
    (3, 64, 8, (5, 6), SAME),  # columns of a tile from one place of the kernel, positions beyond the last
    (2, 64, 70, (8, 8), SAME),  # as many positions as a tile is deep: a record is one step
    (2, 32, 70, (9, 15), Window((2, 3), (2, 1), (1, 2), (1, 2))),
    (3, 3, 16, (16, 16), SAME),  # columns from several places, several steps
    (2, 16, 130, (4, 5), Window()),  # input and output have the same positions
    (2, 24, 20, (12, 11), Window()),
    (2, 64, 9, (9, 9), Window((1, 1), (2, 2))),
    (2, 64, 9, (4, 5), Window((1, 1), (1, 1), (1, 2))),  # of size one, with a border
    (1, 1, 1, (4, 4), Window()),
]
LAYOUTS = ["plain", "last", "plain x", "plain d"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    found = kernel_device()
    monkeypatch.setattr(_tiles, "PLANES", (torch.float32, torch.bfloat16))
    return found


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def drawn(seed: int, count: int) -> Iterator[tuple]:
    """Convolutions at random with at least 16 positions."""
    dice = random.Random(seed)
    while count:
        kernel, stride, dilation = ((dice.randint(1, 3), dice.randint(1, 3)) for _ in range(3))
        window = Window(kernel, stride, (dice.randint(0, 2), dice.randint(0, 2)), dilation)
        size = dice.randint(4, 14), dice.randint(4, 14)
        reach = [e * (k - 1) + 1 for k, e in zip(kernel, dilation, strict=True)]
        outs = [(n + 2 * p - r) // s + 1 for n, p, r, s in zip(size, window.padding, reach, stride, strict=True)]
        if min(outs) >= 1 and math.prod(outs) >= 16:
            count -= 1
            yield dice.randint(1, 4), dice.choice([1, 3, 17, 32, 64]), dice.choice([1, 5, 65]), size, window


def laid(x: Tensor, d: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    last = {"plain": (), "last": (0, 1), "plain x": (1,), "plain d": (0,)}[layout]
    pair = [t.contiguous(memory_format=torch.channels_last) if i in last else t for i, t in enumerate((x, d))]
    return pair[0], pair[1]


def is_the_sum(x: Tensor, d: Tensor, window: Window, group: int = 0) -> None:
    exact, room = gradients(x, d, window), tile_rounding(positions(d)) * free(x, d, window)
    for weight in (None, torch.rand(len(x), generator=torch.Generator().manual_seed(1)).to(x.device)):
        found = tile_sums(x, d, weight, window, group=group)
        scale = torch.ones(len(x), device=x.device) if weight is None else weight
        expected = (scale.double().view(-1, 1, 1, 1, 1) * exact).sum(0)
        assert found.shape == expected.shape and found.dtype == (torch.float32 if group else torch.float64)
        more = tile_additions(group) * 2.0**-24 * free(x, d, window)
        assert float((found - expected).norm()) <= float((scale * (room + more)).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_convolutions(layout, dtype, device):
    for case in [*FIXED[:5], *drawn(LAYOUTS.index(layout), 3)] if layout != "plain" else [*FIXED, *drawn(9, 6)]:
        x, d, window = conv_factors(case, dtype, device)
        is_the_sum(*laid(x, d, layout), window)


@pytest.mark.parametrize("group", [1, 16])
def test_sums_in_groups(group, device):
    for case in FIXED[:4]:
        is_the_sum(*conv_factors(case, torch.float32, device), group=group)


@pytest.mark.parametrize("way", ["grams", "products"])
@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_exact_and_never_below(way, beta, dtype, device, monkeypatch):
    monkeypatch.setattr(_tiles, "by_grams", lambda *a: way == "grams")
    for case in [*FIXED, *drawn(5, 3)]:
        x, d, window = conv_factors(case, dtype, device)
        if way == "products" or positions(d) <= _tiles.WIDEST_GRAM:
            norms_hold(x, d, window, beta)


def norms_hold(x: Tensor, d: Tensor, window: Window, beta: float) -> None:
    sums = d.double().sum((2, 3))
    exact = gradients(x, d, window).flatten(1).square().sum(1) + (beta * sums).square().sum(1)
    found = tile_norms(x, d, beta, window, counts_of(x, d, window)).double()
    assert bool((found >= exact.sqrt()).all())
    assert bool((found <= exact.sqrt() * 1.01 + 2e-3 * free(x, d, window, beta)).all())


def squares_are_exact(device: torch.device) -> None:
    """Squares by tiles alone, without the room that norms add to them."""
    for case in FIXED[:4]:
        x, d, window = conv_factors(case, torch.float32, device)
        found = _tiles._squares(_tiles._flat(x, d, window)).double().sum(1).sqrt()
        exact = gradients(x, d, window).flatten(1).norm(dim=1)
        assert bool(
            ((found - exact).abs() <= tile_rounding(positions(d)) * free(x, d, window) + 2.0**-12 * exact).all()
        )


def test_squares_by_tiles(device):
    squares_are_exact(device)


def sums_of_one_place(device: torch.device) -> None:
    """Columns of a tile from one place of the kernel, with strides, dilations and a border; one step and several."""
    for case in (FIXED[0], FIXED[1], FIXED[2], (2, 64, 8, (9, 12), Window((2, 3), (2, 2), (1, 2), (2, 2)))):
        x, d, window = conv_factors(case, torch.float32, device)
        inside = torch.zeros(len(x) + 2, *x.shape[1:], device=device)
        inside[1:-1] = x  # what lies beside a record is memory of ours
        is_the_sum(inside[1:-1], d, window)


def test_sums_of_one_place_of_the_kernel(device):
    sums_of_one_place(device)


def several_places(device: torch.device) -> None:
    for case in (FIXED[3], (2, 5, 20, (9, 8), Window((3, 2), (2, 1), (1, 2), (1, 2)))):
        x, d, window = conv_factors(case, torch.float32, device)
        inside = torch.zeros(len(x) + 2, *x.shape[1:], device=device)
        inside[1:-1] = x
        is_the_sum(inside[1:-1], d, window)


def cut_before(device: torch.device) -> None:
    """No operand keeps more than TF32 has: the product is that of what was cut, on either side."""
    x, d = torch.ones(2, 64, 4, 4, device=device), torch.full((2, 16, 4, 4), UNCUT, device=device)
    for left, right in ((x, d[:, :16]), (torch.full_like(x, UNCUT), torch.ones_like(d))):
        assert torch.equal(tile_sums(left, right, None), torch.full((16, 64, 1, 1), 32.0, device=device).double())


def test_operands_are_cut(device):
    cut_before(device)
    assert float(cut(torch.tensor([UNCUT]))) == 1.0


def others_are_larger(device: torch.device) -> None:
    """A record adds the same product whoever stands before it: others that are much larger move nothing of it."""
    for size in ((4, 5), (10, 13)):
        x, d, window = conv_factors((9, 5, 6, size, SAME), torch.float32, device)
        d[:8] *= 1000
        scale = torch.rand(9, generator=torch.Generator().manual_seed(3)).to(device)
        moved = tile_sums(x, d, scale, window) - tile_sums(x[:8], d[:8], scale[:8], window)
        alone = tile_sums(x[8:], d[8:], scale[8:], window)
        assert float((moved - alone).norm()) <= 1e-9 * float(alone.norm())


@pytest.mark.parametrize("parts", [1, 4])
def test_a_record_adds_the_same_whoever_else_is_there(parts, device, monkeypatch):
    monkeypatch.setattr(_tiles, "_parts", lambda *a: parts)
    others_are_larger(device)


def test_a_record_has_the_same_bits_in_every_place(device, monkeypatch):
    for case in FIXED[:3]:
        x, d, window = conv_factors((1, *case[1:]), torch.float32, device)
        alone = tile_sums(x, d, torch.full((1,), 0.7, device=device), window)
        others, e, _ = conv_factors((5, *case[1:]), torch.float32, device, seed=1)
        for place in (0, 2, 4):
            others[place], e[place] = x[0], d[0]
            scale = torch.zeros(5, device=device)
            scale[place] = 0.7
            monkeypatch.setattr(_tiles, "_parts", lambda *a, place=place: 1 + place)
            assert torch.equal(tile_sums(others, e, scale, window), alone)


def test_a_single_record_is_read_in_the_layout_of_many(device):
    """A batch of one has no stride between records: whether it is plain must not follow from that."""
    x = torch.randn(3, 32, 6, 6, generator=torch.Generator().manual_seed(0)).to(device)[:, :16]
    d = torch.randn(3, 8, 6, 6).to(device).contiguous(memory_format=torch.channels_last)
    window = Window((3, 3), padding=(1, 1))
    for left, right in ((x, d), (d[:, :4], d)):
        assert _tiles._flat(left, right, window).plain == _tiles._flat(left[:1], right[:1], window).plain
    scale = torch.zeros(3, device=device)
    scale[0] = 0.7
    assert torch.equal(tile_sums(x, d, scale, window), tile_sums(x[:1], d[:1], scale[:1], window))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_records_with_scale_zero_add_exact_zeros(device):
    zero_is_zero(device)


def zero_is_zero(device: torch.device) -> None:
    """Records that are not finite, before and after others whose positions do not fill a step."""
    for case in ((4, 64, 9, (4, 5), SAME), (4, 3, 16, (9, 15), SAME), (4, 16, 16, (4, 5), Window())):
        x, d, window = conv_factors(case, torch.float32, device)
        for i in (0, 2):
            x[i], d[i] = math.nan, math.inf
        scale = torch.tensor([0.0, 0.5, 0.0, 1.0], device=device)
        for group in (0, 16):
            found = tile_sums(x, d, scale, window, group=group)
            assert torch.equal(found, tile_sums(x[1::2], d[1::2], scale[1::2], window, group=group))


def pair(b: int, extra: bool, kernel: bool, device: torch.device) -> tuple[Tensor, Tensor, Window]:
    """Records that round one way without the extra one and the other way with it, if sums are float32."""
    x, d = (t.float().view(-1, 1, 4, 4).to(device) for t in rounding_pair(b, extra))
    assert torch.equal(x, cut(x)) and torch.equal(d, cut(d))
    return x, d, SAME if kernel else Window()


def moves_by_its_own(b: int, device: torch.device, kernel: bool = False) -> None:
    """With the sum in float64 the extra record of a pair moves it by itself, to a millionth."""
    found, exact = [], []
    for extra in (False, True):
        x, d, window = pair(b, extra, kernel, device)
        found.append(tile_sums(x, d, torch.ones(len(x), device=device), window))
        weight = torch.zeros(1, 1, *window.kernel, dtype=torch.float64, device=device)
        gradient = torch.ops.aten.convolution_backward(
            d.double(), x.double(), weight, None, *window[1:], False, (0, 0), 1, (False, True, False)
        )
        exact.append(gradient[1])
    moved = found[1] - found[0]
    assert float((moved - (exact[1] - exact[0])).abs().max()) < 1e-6
    middle = moved[0, 0, window.kernel[0] // 2, window.kernel[1] // 2]
    assert abs(float(middle) - 1) < 1e-6


@pytest.mark.parametrize(("b", "kernel"), [(256, False), (256, True), (1024, False)])
def test_adversarial_rounding_of_sums_over_records(b, kernel, device, monkeypatch):
    monkeypatch.setattr(_tiles, "_parts", lambda *a: 1)
    moves_by_its_own(b, device, kernel)


@pytest.mark.parametrize(("group", "b"), [(1, 256), (16, 256), (64, 256), (23, 1024)])
def test_groups_move_by_no_more_than_their_additions_allow(group, b, device):
    found = []
    for extra in (False, True):
        x, d, window = pair(b, extra, False, device)
        found.append(float(tile_sums(x, d, torch.ones(len(x), device=device), window, group=group)))
    assert abs(found[1] - found[0] - 1) <= 2 * tile_additions(group) * 2.0**-24 * b * 1.0


@pytest.mark.parametrize("size", [(8, 8), (16, 16)])
def test_adversarial_rounding_inside_of_a_record(size, device):
    """One large product, then many that each fall short of what a float32 sum can hold: the share allows for all."""
    x, d = torch.ones(2, 64, *size), torch.full((2, 16, *size), 2.0**-24 * (1 - 2.0**-10))
    d[:, :, 0, 0] = 1.0
    d[1] *= -1
    x, d = x.to(device), d.to(device)
    exact = torch.einsum("nohw,nihw->noi", d.double(), x.double())
    for i in range(2):
        found = tile_sums(x[i : i + 1], d[i : i + 1], None)[:, :, 0, 0]
        sizes = x[i].flatten(1).double().norm(dim=1) * d[i].flatten(1).double().norm(dim=1)[:, None]
        assert bool(((found - exact[i]).abs() <= tile_rounding(math.prod(size)) * sizes).all())
    norms = tile_norms(x, d, 0.0, Window(), counts_of(x, d, Window())).double()
    assert bool((norms >= exact.flatten(1).norm(dim=1)).all())


def test_what_is_copied(monkeypatch):
    x, d = torch.randn(2, 16, 8, 8), torch.randn(2, 32, 8, 8)
    for layout, plain, same in (
        ("plain", True, (True, True)),
        ("last", False, (True, True)),
        ("plain x", False, (False, True)),  # the smaller one is turned
        ("plain d", True, (False, True)),
    ):
        pair = laid(x, d, layout)
        flat = _tiles._flat(*pair, SAME)
        assert flat.plain == plain
        assert same == tuple(a.data_ptr() == b.data_ptr() for a, b in zip((flat.x, flat.d), pair, strict=True))
        assert (flat.records, flat.places, flat.outs, flat.columns) == (2, 64, 32, 144)
    assert not _tiles._flat(x.bfloat16(), d.bfloat16(), SAME).plain
    monkeypatch.setattr(_tiles, "PLANES", ())
    assert not _tiles._flat(x, d, SAME).plain


def test_programs_hold_all_records(monkeypatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(_tiles, "_launch", lambda flat, scale, out, share, *rest: asked.append((share, len(out))))
    for records in (1, 17, 400):
        for channels, out in ((3, 8), (64, 64)):
            x, d = torch.zeros(records, channels, 4, 4), torch.zeros(records, out, 4, 4)
            for group in (0, 1, 100):
                tile_sums(x, d, None, SAME, group=group)
                share, parts = asked.pop()
                assert share * parts >= records > share * (parts - 1)
                assert not group or share <= group
