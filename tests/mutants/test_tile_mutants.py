"""Mistakes in the kernels of tiles, made on purpose in their source: the tests of tiles must notice each."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.factors.kernels import test_cut as cut
from tests.factors.kernels import test_products as products
from tests.factors.kernels import test_tiles as checks
from tests.triton_kit import kernel_device, run_interpreted

from weightclip.factors import Product, _conv
from weightclip.factors._collector import Use
from weightclip.factors.kernels import _products, _tiles
from weightclip.noise import _release

SOURCE = Path(_tiles.__file__).with_name("_tiles_triton.py")
NORMS = Path(_tiles.__file__).with_name("_products_triton.py")


@pytest.fixture
def interpreter() -> torch.device:
    return kernel_device()


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def mutated(source: Path, old: str, new: str, folder: Path):
    """The kernels with one piece of their source replaced; Triton reads it from the file."""
    text = source.read_text()
    assert text.count(old) == 1, f"{old!r} is not in the source once"
    path = folder / f"mutant{source.name}"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda: module


def far_below(device: torch.device) -> None:
    """Norms of products, positions more than one tile is deep, and of the bias."""
    generator = torch.Generator().manual_seed(0)
    x, d = (torch.randn(2, 130, n, generator=generator).bfloat16().to(device) for n in (6, 9))
    exact = torch.einsum("npo,npi->noi", d.double(), x.double()).flatten(1).square().sum(1)
    exact = (exact + d.double().sum(1).square().sum(1)).sqrt()
    assert bool((_tiles.tile_norms(x, d, 1.0).double() >= exact).all())


def few_positions(device: torch.device) -> None:
    """Grams: norms with the bias, which is most of the norm where inputs are small."""
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 0.01):
        x, d = (torch.randn(2, 80, n, generator=generator).bfloat16().to(device) for n in (200, 200))
        x = x * size
        exact = torch.einsum("npo,npi->noi", d.double(), x.double()).flatten(1).square().sum(1)
        exact = (exact + d.double().sum(1).square().sum(1)).sqrt()
        assert bool((_tiles.tile_norms(x, d, 1.0).double() >= exact).all())


def not_finite(device: torch.device) -> None:
    x, d = (torch.ones(1, 16, n, dtype=torch.bfloat16, device=device) for n in (40, 40))
    x[0, 0, 0] = math.nan
    assert not torch.isfinite(_tiles.tile_norms(x, d, 0.0)).any()


def adversarial(device: torch.device) -> None:
    checks.moves_by_one(256, device)


MUTANTS: dict[str, tuple[Path, str, str, Callable[[torch.device], None]]] = {
    "sums in float32": (SOURCE, "        total += part.to(tl.float64)",
                        "        total = (total + part).to(tl.float32).to(tl.float64)", adversarial),
    "a record's tile goes on into the next": (SOURCE, "                part = tl.zeros((ROWS, COLS), dtype=tl.float32)",
                                              "                part = part * 1.0", checks.moved_by_itself),
    "a second half without its scale": (SOURCE, "second = _added(second, other, s, SCALED, GROUPED)",
                                        "second = _added(second, other, s, False, GROUPED)", checks.wide_group),
    "a bias without its scale": (NORMS, "tl.where(s > 0, whole * s, 0.0)", "tl.where(s > 0, whole, 0.0)",
                                 products.bias_of_records),
    "a bias of zero times NaN": (NORMS, "whole = tl.where(s > 0, whole * s, 0.0)", "whole = whole * s",
                                 products.bias_of_records),
    "zero times NaN": (SOURCE, "tl.where(s > 0, part * s, 0.0)", "(part * s)", checks.zero_is_zero),
    "the bias left out of grams": (SOURCE, "(left + beta2) * right", "left * right", few_positions),
    "columns left out of grams": (SOURCE, "for k in range(0, COLUMNS, DEPTH):",
                                  "for k in range(0, COLUMNS - DEPTH, DEPTH):", few_positions),
    "the bias left out of norms": (NORMS, "square += beta2 * plain * plain", "square += 0 * plain", far_below),
    "a norm that is not a number as zero": (
        NORMS, 'square = tl.where(tl.abs(square) < float("inf"), square, float("inf"))  # NaN as well',
        "x2 = tl.where(x2 == x2, x2, 0.0)", not_finite),
    "positions of the next record in a norm": (NORMS, "here = k < end", "here = k < total",
                                               products.norms_of_gradients),
    "tiles of a norm in each other's place": (
        NORMS, "tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)", "tile = tl.program_id(1)",
        lambda device: products.norms_of_gradients(device, products.CASES[-1])),
    "a norm that is not squared": (NORMS, "acc * acc", "acc", products.norms_of_gradients),
    "rounding left out of norms": (
        NORMS, "square = tl.where(square > 0, square, 0.0) * (1 + 2.0**-15) + share * free + hidden\n"
               "    norm = tl.maximum(tl.sqrt(square) + rounding * tl.sqrt(free), least * tl.sqrt(free))",
        "norm = (1 - 2.0**-22) * (tl.sqrt(tl.where(square > 0, square, 0.0)))", checks.covers_what_is_formed),
    "positions that cancel as nothing": (NORMS, "rounding * tl.sqrt(free), least *", "rounding * tl.sqrt(free), 0 *",
                                         checks.least_part),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_mutant_dies(name, interpreter, tmp_path, monkeypatch):
    source, old, new, check = MUTANTS[name]
    if check is not few_positions:
        monkeypatch.setattr(_tiles, "by_grams", lambda *a: False)
    monkeypatch.setattr(_tiles, "_WAVES", 1)
    check(interpreter)
    mutant = mutated(source, old, new, tmp_path)
    monkeypatch.setattr(_tiles, "_kernels" if source == SOURCE else "_norm_kernels", mutant)
    if source == NORMS:
        monkeypatch.setattr(_products, "_kernels", mutant)
    with pytest.raises(AssertionError):
        check(interpreter)


@pytest.mark.parametrize(
    ("name", "wrong", "check"),
    [
        ("wide", lambda t: 0 * t, products.norms_of_gradients),  # the bias left out
        ("CANCELLED", 0.0, products.cancelling),
        ("product_rounding", lambda places, product: 0.0, products.added_above),
        (
            "gradient_squares",
            lambda x, *rest: torch.nan_to_num(_products.gradient_squares(x, *rest)),
            products.not_finite,
        ),
    ],
)
def test_a_norm_by_products_that_forgets_something_is_noticed(name, wrong, check, interpreter, monkeypatch):
    check(interpreter)
    monkeypatch.setattr(_conv, name, wrong)
    if name == "gradient_squares":  # a factor that is not finite has to be forgotten twice
        monkeypatch.setattr(_conv, "fused_norms", lambda x, d, *rest: torch.ones(len(x), device=x.device))
    with pytest.raises(AssertionError):
        check(interpreter)


@pytest.mark.parametrize("check", [cut.rows_that_cancel, cut.uses_that_cancel])
def test_norms_that_forget_what_tiles_cut_are_noticed(check, interpreter, monkeypatch):
    cut.as_on_a_gpu(monkeypatch)
    check(interpreter)
    monkeypatch.setattr(Use, "cut", lambda use: False)
    with pytest.raises(AssertionError):
        check(interpreter)


def test_parts_that_hold_more_than_a_group_are_noticed(monkeypatch):
    checks.parts_hold_groups(monkeypatch)
    monkeypatch.setattr(_tiles, "_parts", lambda flat, how, group: 1)
    with pytest.raises(AssertionError):
        checks.parts_hold_groups(monkeypatch)


def test_a_sensitivity_that_forgets_the_additions_of_groups_is_noticed(monkeypatch):
    group_is_counted()
    monkeypatch.setattr(_release, "tile_additions", lambda group: 0)
    with pytest.raises(AssertionError):
        group_is_counted()


def group_is_counted() -> None:
    """The allowance for a layer whose tiles are added in groups holds every addition of a draw's records."""
    plan = SimpleNamespace(layers={"0": None}, uses=lambda path: [SimpleNamespace(outside=(64, 8), inside=(64, 8))],
                           model=torch.nn.Sequential(torch.nn.Linear(8, 8)))  # fmt: skip
    for group in (16, 300):
        product = {"0": Product(torch.float32, 1, group=group)}
        (slack,) = _release.sum_slack(plan, product, 100, None)  # type: ignore[arg-type]
        assert slack >= 1 + 2 * group * 2.0**-24 * 100
