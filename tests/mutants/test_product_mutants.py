"""Mistakes in the kernels of sums, scales and rows, made on purpose in their source: their tests must notice each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.factors.kernels import test_one_launch as rows
from tests.factors.kernels import test_products as products
from tests.factors.kernels import test_products_totals as totals
from tests.mutants.test_tile_mutants import mutated
from tests.triton_kit import kernel_device, run_interpreted

from weightclip.factors import _affine, _dense
from weightclip.factors.kernels import _one_launch, _products, _products_totals, _tiles
from weightclip.losses import CrossEntropy

Check = Callable[[torch.device], None]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, at NaN and infinity


@pytest.fixture
def device() -> torch.device:
    return kernel_device()


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def gradients(device: torch.device) -> None:
    with pytest.MonkeyPatch.context() as patch:
        products.test_it_is_the_scaled_gradient_in_float64(products.CASES[0], False, True, True, device, patch)


def zeros(device: torch.device) -> None:
    products.test_records_with_scale_zero_add_exact_zeros(False, device)


def zeros_last(device: torch.device) -> None:
    products.test_records_with_scale_zero_add_exact_zeros(True, device)


def sums(device: torch.device) -> None:
    products.test_sums_over_records_and_positions((5, 3, 7), False, True, device)


def sums_by_records(device: torch.device) -> None:
    products.test_sums_over_records_and_positions((70, 3, 16), True, True, device)


def scales(device: torch.device) -> None:
    for flags in (1, 2, 4, 7):
        products.test_fused_scales_are_those_of_the_norms(flags, True, device)


def norms(device: torch.device) -> None:
    products.test_fused_norms_are_those_of_the_factors(False, device)


def hidden(device: torch.device) -> None:
    for size in (5, 20_000):
        products.test_what_squares_hide_is_limited(size, device)
    totals.hidden(device)


def channels(device: torch.device) -> None:
    products.test_scales_and_norms_of_a_gain_and_an_offset_per_channel((8, 70, 20), False, device)


def together(device: torch.device) -> None:
    totals.found_together(device, (3, 130, 200, 70))


def together_wide(device: torch.device) -> None:
    totals.found_together(device, (3, 64, 300, 3), torch.float32)


def together_deep(device: torch.device) -> None:
    totals.found_together(device, (3, 130, 3, 70), torch.float32)


def scaled_sums(device: torch.device) -> None:
    totals.scaled_sums(device)
    totals.scaled_sums(device, 70, torch.float64)


def normalisation(device: torch.device) -> None:
    for limits in totals.AFFINE_LIMITS[1:]:
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            totals.affine_layer(device, patch, limits, torch.float32, False)


def dense_layer(device: torch.device) -> None:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        totals.dense_layer(device, patch, totals.DENSE_LIMITS[0])


def entropy(device: torch.device) -> None:
    rows.test_cross_entropy_is_the_one_of_the_operators(10, CrossEntropy(temperature=0.3, ignore_index=1), device)


def projections(device: torch.device) -> None:
    for radius in (1.0, 1e-6):
        rows.test_records_are_projected((3, 2, 17, 31), radius, device)


def blocks(device: torch.device) -> None:
    rows.test_blocks_are_scaled([7, 1, 3000, 0, 5], device)


NORMS = "x_norm, d_norm = tl.sqrt_rn(x2 + tiny_x + bias), tl.sqrt_rn(d2 + tiny_d)"
ONE_PASS, SHARED = "CHANNELS, BLOCK)\n    " + NORMS, "x2, d2 = _whole(found, n, SPLITS)\n    " + NORMS
SCALED = "a = tl.where(s > 0, a, 0.0) * s\n"
OF_SUMS = "s = tl.load(scale + n, mask=k < total, other=0.0).to(tl.float32)[None, :]\n            "
OF_ALL = "product += a * b\n    rows = 2 if PRODUCT else 1\n    place = out + tl.program_id(1)"
PLAIN_PLACES = "(z >= 0) & (z < width)\n            b = tl.load(x + (record * xn)[None, :]"
PLAIN_PLACES = "& (y >= 0) & (y < height) & " + PLAIN_PLACES
READ_BY_RECORDS = "c[None, :] * xc, mask=inside, other=0.0).to(tl.float64)\n            if SCALED:\n                "
READ_IN_SUMS = "b = tl.load(at, mask=inside, other=0.0).to(tl.float64)\n            if SCALED:\n                "
KEPT = "b = tl.where(s > 0, b, 0.0)"

PRODUCTS: dict[str, tuple[str, str, Check]] = {
    "products: no scale": ("a = tl.where(s[None, :] > 0, a, 0.0) * s[None, :]", "a = tl.where(s[None, :] > 0, a, 0.0)",
                           gradients),
    "products: the next record's scale": ("s = tl.load(scale + n, mask=here",
                                          "s = tl.load(scale + (n + 1) % (total // (HIGH * WIDE)), mask=here",
                                          gradients),
    "products: zero times a cotangent of infinity": ("tl.where(s[None, :] > 0, a, 0.0) * s[None, :]", "a * s[None, :]",
                                                     zeros),
    "products: zero times an input of NaN": ("b = tl.where(s[None, :] > 0, b.to(tl.float32), 0.0)",
                                             "b = b.to(tl.float32)", zeros),
    "products: zero times NaN, channels last": ("b = tl.where(s[:, None] > 0, b.to(tl.float32), 0.0)",
                                                "b = b.to(tl.float32)", zeros_last),
    "products: sums in float32": ("acc = tl.dot(a.to(tl.float64), b.to(tl.float64), acc, out_dtype=tl.float64)",
                                  "acc = (acc + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64))"
                                  ".to(tl.float32).to(tl.float64)", gradients),
    "products: a bias in float32": ("plain += a.to(tl.float64)",
                                    "plain = (plain + a).to(tl.float32).to(tl.float64)", gradients),
    "products: padding that is read": (PLAIN_PLACES, PLAIN_PLACES.replace(" & (z >= 0) & (z < width)", ""), gradients),
    "sums: no scale": (OF_SUMS + SCALED, OF_SUMS + "a = tl.where(s > 0, a, 0.0)\n", sums),
    "sums: the first record's scale": (OF_SUMS + SCALED, OF_SUMS.replace("scale + n", "scale + 2 + 0 * n") + SCALED,
                                       sums),
    "sums: zero times infinity": (OF_SUMS + SCALED, OF_SUMS + "a = a * s\n", sums),
    "sums: an input of NaN": (READ_IN_SUMS + KEPT, READ_IN_SUMS + "b = b + 0.0", sums),
    "sums: a product without its scale": (OF_ALL, OF_ALL.replace("a * b", "a / tl.where(s > 0, s, 1.0) * b"), sums),
    "record_totals: no scale": ("                " + SCALED, "                a = tl.where(s > 0, a, 0.0)\n",
                                sums_by_records),
    "record_totals: another record's scale": ("s = tl.load(scale + n).to(tl.float32)",
                                              "s = tl.load(scale + 2).to(tl.float32)", sums_by_records),
    "record_totals: an input of NaN": (READ_BY_RECORDS + KEPT, READ_BY_RECORDS + "b = b + 0.0", sums_by_records),
    "over_records: records twice": ("n = start + tl.arange(0, RECORDS)", "n = start // 2 + tl.arange(0, RECORDS)",
                                    sums_by_records),
    "over_records: float32": ("tl.store(out + e, tl.sum(acc, 0)", "tl.store(out + e, tl.sum(acc.to(tl.float32), 0)",
                              sums_by_records),
    "scales: no bias": (ONE_PASS, ONE_PASS.replace(" + bias", ""), scales),
    "scales: hidden squares of inputs": (ONE_PASS, ONE_PASS.replace(" + tiny_x", ""), hidden),
    "scales: hidden squares of cotangents": (ONE_PASS, ONE_PASS.replace(" + tiny_d", ""), hidden),
    "scales: another record": ("_energies(x, d, counts, n, x_size, d_size, x_step, d_step, places, WEIGHTED, CHANNELS, "
                               "BLOCK)\n    x_norm", "_energies(x, d, counts, n * 0, x_size, d_size, x_step, d_step, "
                               "places, WEIGHTED, CHANNELS, BLOCK)\n    x_norm", scales),
    "_limited: a radius that scales up": ("tl.minimum(tl.div_rn(tl.load(limits), tl.maximum(x_norm, FLOOR)), 1.0)",
                                          "tl.div_rn(tl.load(limits), tl.maximum(x_norm, FLOOR))", scales),
    "_limited: a limit of cotangents that scales up": (
        "tl.minimum(tl.div_rn(tl.load(limits + 1), tl.maximum(d_norm, FLOOR)), 1.0)",
        "tl.div_rn(tl.load(limits + 1), tl.maximum(d_norm, FLOOR))", scales),
    "_limited: a cap that scales up": ("tl.minimum(tl.div_rn(tl.load(limits + 2), tl.maximum(product, FLOOR)), 1.0)",
                                       "tl.div_rn(tl.load(limits + 2), tl.maximum(product, FLOOR))", scales),
    "_limited: a cap on one factor": ("product = scale * x_norm * d_norm", "product = scale * x_norm", scales),
    "_limited: a cap in place of the others": ("scale = scale * tl.minimum(tl.div_rn(tl.load(limits + 2)",
                                               "scale = tl.minimum(tl.div_rn(tl.load(limits + 2)", scales),
    "_limited: a record that is not finite": ("result = tl.where(good, scale, 0.0)", "result = scale", scales),
    "_limited: a cotangent that is not finite": ('& (d_norm < float("inf")) & (scale <', "& (scale <", scales),
    "_limited: a scale below the normal numbers": (" & (scale >= SMALLEST)", "",
                                                   products.test_fused_scales_below_the_normal_numbers_are_zero),
    "_limited: a product that is not a number": ('result = tl.where(product < float("inf"), product, float("inf"))',
                                                 "result = product", norms),
    "_energies: as far as the shorter factor": ("* BLOCK, max(x_size, d_size), step)",
                                                "* BLOCK, min(x_size, d_size), step)", scales),
    "_energies: inputs that lie in one patch": ("square = square * tl.load(counts + place, mask=e < x_size, other=0.0)",
                                                "square = square * 1.0", scales),
    "_energies: another position's weight": ("place = e // CHANNELS if CHANNELS > 0 else e % places",
                                             "place = e % places", scales),
    "_energies: cotangents of the first share": ("d2 += b * b", "d2 += tl.where(tl.program_id(1) == 0, b * b, 0.0)",
                                                 products.test_scales_of_few_large_records),
    "_energies: no cotangents": ("d2 += b * b", "d2 += 0 * b", scales),
    "moments: cotangents left out": ("tl.store(place + 1, d2)", "tl.store(place + 1, 0 * d2)",
                                     products.test_scales_of_few_large_records),
    "moments: half of the inputs": ("tl.store(place, x2)", "tl.store(place, 0.5 * x2)",
                                    products.test_scales_of_few_large_records),
    "_whole: one share of cotangents": ("tl.sum(tl.load(found + k + 1), 0)",
                                        "tl.load(found + 2 * n * SPLITS + 1)",
                                        products.test_scales_of_few_large_records),
    "_whole: one share of inputs": ("tl.sum(tl.load(found + k), 0)", "tl.max(tl.load(found + k), 0)",
                                    products.test_scales_of_few_large_records),
    "_whole: another record's": ("k = 2 * (n * SPLITS + ", "k = 2 * (0 * n + ",
                                 products.test_scales_of_few_large_records),
    "finish_scales: no bias": (SHARED, SHARED.replace(" + bias", ""), products.test_scales_of_few_large_records),
    "finish_scales: hidden squares": (SHARED, SHARED.replace(" + tiny_x", ""), hidden),
    "finish_scales: hidden squares of cotangents": (SHARED, SHARED.replace(" + tiny_d", ""), hidden),
    "channels: positions of one step": ("for start in range(0, places, DEPTH):", "for start in range(0, DEPTH, DEPTH):",
                                        channels),
    "channels: no offset": ("tl.store(place + blocks, tl.sum(offsets * offsets, 0))",
                            "tl.store(place + blocks, 0.0 * tl.sum(offsets, 0))", channels),
    "channels: rounding of gains": ("third += tl.abs(a * b)", "third += 0 * tl.abs(a * b)", channels),
    "channels: rounding of gains that cancels": ("third += tl.abs(a * b)", "third += a * b", channels),
    "channels: rounding of offsets": ("fourth += tl.abs(a)", "fourth += a", channels),
    "channels: cotangents of one channel": ("tl.store(place + blocks, tl.sum(tl.sum(second, 1), 0))",
                                            "tl.store(place + blocks, tl.max(tl.sum(second, 1), 0))", channels),
    "channels: NaN passed over": ('tl.where(bad, float("inf"), tl.max(gains, 0))',
                                  "tl.max(tl.where(gains == gains, gains, 0.0), 0)", channels),
    "finish_channels: channels of one block": ("tl.sqrt(tl.max(first, 0) + ",
                                               "tl.sqrt(tl.sum(tl.where(q == 0, first, 0.0), 0) + ", channels),
    "finish_channels: gains of one block": ("tl.sqrt(tl.sum(first, 0) + ", "tl.sqrt(tl.max(first, 0) + ", channels),
    "finish_channels: no bias": ("(beta * beta * shared + tiny_x)", "tiny_x", channels),
    "finish_channels: no offset": ("beta * beta * second) + rounding", "0 * second) + rounding", channels),
    "finish_channels: no rounding": (" + rounding * (third + beta * fourth)", "", channels),
    "finish_channels: rounding of the offset": ("(third + beta * fourth)", "third", channels),
    "finish_channels: the last rounding": (
        "norm = norm.to(tl.float32) * (1 + 2.0**-22)\n        tl.store", "norm = norm.to(tl.float32)\n        tl.store",
        channels),
    "finish_channels: NaN as a norm": ('        tl.store(out + n, tl.where(norm < float("inf"), norm, float("inf")))',
                                       "        tl.store(out + n, norm)", channels),
    "finish_channels: hidden squares": ("+ tiny_x)).to(tl.float32)", ")).to(tl.float32)",
                                        products.test_what_squares_of_channels_hide_is_limited),
    "finish_channels: hidden squares of cotangents": ("tl.sqrt(second + tiny_d)", "tl.sqrt(second)",
                                                      products.test_what_squares_of_channels_hide_is_limited),
    "over_records: no scale": ("value = tl.where(s > 0, value * s, 0.0)", "value = tl.where(s > 0, value, 0.0)",
                               scaled_sums),
    "over_records: zero times NaN": ("value = tl.where(s > 0, value * s, 0.0)", "value = value * s", scaled_sums),
    "over_records: another record's scale": ("s = tl.load(scale + n, mask=n < records",
                                             "s = tl.load(scale + n - start, mask=n < records", scaled_sums),
    "moments_and_totals: inputs of one step": ("x2 += b * b", "x2 = b * b", together),
    "moments_and_totals: inputs of one program": ("e = i * step + tl.program_id(1) * (CHANNELS * DEPTH) +",
                                                  "e = i * step +", together),
    "moments_and_totals: as far as cotangents go": ("range(0, max(tl.cdiv(x_size, step), tl.cdiv(positions, DEPTH)))",
                                                    "range(0, tl.cdiv(positions, DEPTH))", together_wide),
    "moments_and_totals: as far as inputs go": ("range(0, max(tl.cdiv(x_size, step), tl.cdiv(positions, DEPTH)))",
                                                "range(0, tl.cdiv(x_size, step))", together_deep),
    "moments_and_totals: cotangents of one step": ("d2 += a * a", "d2 = a * a", together),
    "moments_and_totals: cotangents of one block": ("tl.store(place + 1, tl.sum(tl.sum(d2, 1), 0))",
                                                    "tl.store(place + 1, tl.where(tl.program_id(1) == 0, "
                                                    "tl.sum(tl.sum(d2, 1), 0), 0.0))", together),
    "moments_and_totals: sums of one step": ("d2 += a * a\n        plain += a", "d2 += a * a\n        plain = a",
                                             together),
    "moments_and_totals: another record's sums": ("d + n * d_step + p[:, None] * channels",
                                                  "d + 0 * n * d_step + p[:, None] * channels", together),
    "channels: sums of one step": ("if TOTALS:\n                third += a", "if TOTALS:\n                third = a",
                                   normalisation),
    "channels: sums in each other's place": ("second if EXACT else fourth", "first if EXACT else third", normalisation),
    "channels: squares in place of sums": ("tl.sum(first if EXACT else third, 1)", "tl.sum(first, 1)", normalisation),
    "channels: sums of another record": ("whole = totals + n * 2 * count", "whole = totals + (n + 1) % 2 * 2 * count",
                                         normalisation),
}  # fmt: skip

ROWS: dict[str, tuple[str, str, Check]] = {
    "projected: outwards": ("tl.minimum(radius / tl.maximum(norm, 1e-300), 1.0)", "radius / tl.maximum(norm, 1e-300)",
                            projections),
    "projected: by the last entries": ("total += value * value", "total = value * value", projections),
    "projected: squares in float32": ("total += value * value", "total += (value * value).to(tl.float32)",
                                      projections),
    "projected: not a number": ("tl.where(good, value, 0.0)", "value", projections),
    "projected: a subnormal scale": ("value = (value * first) * second", "value = value * scale.to(tl.float32)",
                                     projections),
    "projected: half of a huge record's scale": ("value = (value * first) * second", "value = value * first",
                                                 projections),
    "cross_entropy: labels to ignore": (" & (label != ignored)", "", entropy),
    "cross_entropy: labels beyond the classes": ("(label >= 0) & (label < classes)", "(label >= 0)", entropy),
    "cross_entropy: labels below the classes": ("(label >= 0) & ", "", entropy),
    "cross_entropy: outputs that are not finite": (" & (label != ignored) & finite", " & (label != ignored)", entropy),
    "cross_entropy: another record's label": ("label = tl.load(y + n)", "label = tl.load(y + 7)", entropy),
    "cross_entropy: no factor": ("1.0, 0.0)) * factor", "1.0, 0.0))", entropy),
    "cross_entropy: powers that are not divided": ("tl.div_rn(powers, total) -", "powers -", entropy),
    "scaled: the block before": ("<= e) & (low < high)", "< e) & (low < high)", blocks),
    "scaled: the first factor": ("tl.load(factors + low,", "tl.load(factors + 0 * low,", blocks),
    "scaled: no factor": ("other=0.0) * factor, mask", "other=0.0), mask", blocks),
    "scaled: a search that ends early": ("for _ in range(STEPS):", "for _ in range(STEPS - 1):", blocks),
}  # fmt: skip

SOURCES: dict[str, tuple[ModuleType, str]] = {
    **{name: (_products, "_products_triton.py") for name in PRODUCTS},
    **{name: (_one_launch, "_one_launch_triton.py") for name in ROWS},
}
MUTANTS = {**PRODUCTS, **ROWS}
_sound: set[Check] = set()


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_mutant_dies(name, device, tmp_path, monkeypatch):
    old, new, check = MUTANTS[name]
    module, source = SOURCES[name]
    torch.manual_seed(0)
    if check not in _sound:  # once for all mutants that it kills
        check(device)
        _sound.add(check)
    path = Path(_products.__file__).with_name(source)
    mutant = mutated(path, old, new, tmp_path)
    monkeypatch.setattr(module, "_kernels", mutant)
    if module is _products:
        monkeypatch.setattr(_products_totals, "_kernels", mutant)
    with pytest.raises(AssertionError):
        check(device)


def once(device: torch.device) -> None:
    totals.test_what_is_kept_is_for_these_factors_once()


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        (" or found.versions != (version_of(x), version_of(d))", "", once),
        (" or found.versions != (version_of(x), version_of(d))", "", dense_layer),
        ("(version_of(x), version_of(d)):", "(version_of(x), found.versions[1]):", once),
        ("found.x() is not x or ", "", once),
        ('__dict__.pop("', '__dict__.get("', once),
    ],
)
def test_sums_that_are_kept_for_other_numbers_are_noticed(old, new, check, device, tmp_path, monkeypatch):
    check(device)
    wrong = mutated(Path(_products_totals.__file__), old, new, tmp_path)().kept
    for module in (totals, _dense, _affine):
        monkeypatch.setattr(module, "kept", wrong)
    with pytest.raises(AssertionError):
        check(device)


LAUNCHES = {
    "scale.contiguous(), found, x.shape[1]": (_products, "weight_gradient"),
    "d if scale is None else scale.contiguous()\n    found": (_products, "sums"),
    "scale.contiguous(), totals, channels": (_products, "sums by records"),
    "scale.contiguous(), found, totals.shape[0]": (_products, "over_records"),
    "scale.contiguous(), (*flat.tiles": (_tiles, "tile_sums"),
}


@pytest.mark.parametrize("old", list(LAUNCHES))
def test_scales_that_are_read_as_if_they_lay_together_are_noticed(old, device, tmp_path):
    module, way = LAUNCHES[old]
    products.strided_scales(module, way, device)
    wrong = mutated(Path(str(module.__file__)), old, old.replace(".contiguous()", ""), tmp_path)()
    with pytest.raises(AssertionError):
        products.strided_scales(wrong, way, device)
