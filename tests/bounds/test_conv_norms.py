"""Every convolution bound against the singular values of the explicit operator matrix."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.bounds import _conv_norms
from weightclip.bounds._conv_norms import (
    ConvNorm,
    column_sum_norm,
    dft_norm,
    kernel_matrix_norm,
    overlap,
    row_sum_norm,
    schur_norm,
)
from weightclip.errors import CertificationError

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Case:
    """One geometry, drawn at random."""

    weight: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...] | str
    groups: int

    def kwargs(self) -> dict:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}


def basis(channels: int, size: tuple[int, ...]) -> Tensor:
    count = channels * math.prod(size)
    return torch.eye(count, dtype=torch.float64).reshape(count, channels, *size)


def explicit(weight: Tensor, size: tuple[int, ...], groups: int = 1, **kwargs) -> Tensor:
    """The operator matrix, (outputs, inputs), by applying the convolution to every basis vector."""
    x = basis(weight.shape[1] * groups, size)
    return CONV[len(size)](x, weight.double(), groups=groups, **kwargs).flatten(1).T


def explicit_circular(weight: Tensor, size: tuple[int, ...], pad: tuple[int, ...], groups: int = 1, **kwargs) -> Tensor:
    x = basis(weight.shape[1] * groups, size)
    sides = [e for e in reversed(pad) for _ in range(2)]
    return CONV[len(size)](F.pad(x, sides, mode="circular"), weight.double(), groups=groups, **kwargs).flatten(1).T


def top(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def kernel_of(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Random, non-negative (Schur and constant inputs are tight there), sparse, or an alternating sign pattern."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    w = torch.randn(shape, generator=generator)
    style = rng.randrange(4)
    if style == 1:
        return w.abs()
    if style == 2:
        return w * (torch.rand(shape, generator=generator) < 0.3)
    if style == 3:
        return torch.where(torch.arange(w.numel()).reshape(shape) % 2 == 0, 1.0, -1.0)
    return w


def draw(rng: random.Random, axes: int, *, string_padding: bool = True) -> Case:
    """A geometry whose output is not empty."""
    limit = {1: 12, 2: 6, 3: 3}[axes]
    while True:
        groups = rng.choice((1, 1, 2, 3)) if axes < 3 else 1
        kernel = tuple(rng.randint(1, 4 if axes < 3 else 2) for _ in range(axes))
        dilation = tuple(rng.randint(1, 3) for _ in range(axes))
        stride = tuple(rng.randint(1, 4) for _ in range(axes))
        size = tuple(rng.randint(1, limit) for _ in range(axes))
        padding: tuple[int, ...] | str = tuple(rng.randint(0, 4) for _ in range(axes))
        if string_padding and rng.random() < 0.2:
            padding = "same" if rng.random() < 0.5 else "valid"
            stride = (1,) * axes if padding == "same" else stride
        pads = (0,) * axes if isinstance(padding, str) else padding
        if padding != "same" and any(
            n + 2 * e < d * (k - 1) + 1 for n, e, d, k in zip(size, pads, dilation, kernel, strict=True)
        ):
            continue
        shape = (groups * rng.randint(1, 3), rng.randint(1, 3 if axes < 3 else 2), *kernel)
        return Case(kernel_of(rng, shape), size, stride, dilation, padding, groups)


def test_overlap_counts_patches_exactly() -> None:
    """m is the largest number of patches an entry of a long input appears in."""
    for k in range(1, 6):
        for s in range(1, 6):
            for d in range(1, 6):
                long = torch.ones(1, 1, 60, dtype=torch.float64, requires_grad=True)
                y = F.conv1d(long, torch.ones(1, 1, k, dtype=torch.float64), stride=s, dilation=d)
                (counts,) = torch.autograd.grad(y.sum(), long)
                assert overlap(k, s, d) == int(counts.max()), (k, s, d)
    assert overlap((3, 3), 1, 1) == 9
    assert overlap((3, 5), (2, 1), (2, 1)) == 15  # gcd(2, 2) = 2: the stride does not help a dilation of its own size
    assert overlap(5, 1, 1, output_size=2) == 2


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize(("axes", "cases"), [(1, 600), (2, 300), (3, 60)])
def test_zero_padding_bounds_against_the_matrix(axes: int, cases: int) -> None:
    rng = random.Random(axes)
    ratios: dict[str, list[float]] = {"matrix": [], "schur": [], "dft": [], "least": [], "one": [], "inf": []}
    for _ in range(cases):
        case = draw(rng, axes)
        a = explicit(case.weight, case.size, **case.kwargs())
        truth, geometry = top(a), {"groups": case.groups, "stride": case.stride, "dilation": case.dilation}
        m = overlap(case.weight.shape[2:], case.stride, case.dilation)
        full = dft_norm(case.weight, case.groups, case.dilation, case.size, stride=case.stride)
        assert float(full) >= truth, case  # at n + d(k−1), whatever the padding
        bounds = {
            "matrix": math.sqrt(m) * float(kernel_matrix_norm(case.weight, case.groups)),
            "schur": float(schur_norm(case.weight, **geometry)),
            "dft": float(
                dft_norm(case.weight, case.groups, case.dilation, case.size, stride=case.stride, padding=case.padding)
            ),
            "least": float(ConvNorm(**case.kwargs(), input_size=case.size)(case.weight)),
        }
        without_size = float(ConvNorm(**case.kwargs())(case.weight))
        assert without_size >= truth
        assert bounds["least"] <= min(bounds.values()) * (1 + 1e-12)
        assert without_size <= min(bounds["matrix"], bounds["schur"]) * (1 + 1e-12)
        for name, bound in bounds.items():
            assert bound >= truth, (name, case)
            if truth > 0:
                ratios[name].append(truth / bound)
        one, inf = a.abs().sum(0).max(), a.abs().sum(1).max()
        for name, p, value in (("one", 1, one), ("inf", math.inf, inf)):
            bound = float(ConvNorm(**case.kwargs(), p=p)(case.weight))
            assert bound >= float(value), (name, case)
            if value > 0:
                ratios[name].append(float(value) / bound)
    for name, values in ratios.items():
        print(f"{axes}-D {name}: truth/bound at most {max(values):.6f}, median {sorted(values)[len(values) // 2]:.3f}")
        assert max(values) > 0.999, name  # each bound is attained somewhere, so a smaller one would have failed
    assert sorted(ratios["least"])[len(ratios["least"]) // 2] > 0.6


def test_dft_is_nearly_exact_on_large_strided_and_dilated_inputs() -> None:
    torch.manual_seed(0)
    worst = 1.0
    for stride, dilation in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (4, 6)):
        w = torch.randn(2, 2, 3)
        a = explicit(w, (96,), stride=stride, dilation=dilation, padding=1)
        bound = float(ConvNorm(stride=stride, dilation=dilation, padding=1, input_size=96)(w))
        assert bound >= top(a)
        worst = min(worst, top(a) / bound)
    print(f"truth/bound at least {worst:.4f}")
    assert worst > 0.97


def test_bound_at_a_size_holds_for_smaller_inputs() -> None:
    torch.manual_seed(1)
    w = torch.randn(2, 3, 3, 3)
    bound = float(ConvNorm(padding=1, input_size=(6, 6))(w))
    for n in range(1, 7):
        assert bound >= top(explicit(w, (n, n), padding=1))


def test_circular_padding_against_the_matrix() -> None:
    rng = random.Random(7)
    ratios, wrapped, strided, indivisible = [], 0, 0, 0
    while len(ratios) < 250:
        axes = rng.choice((1, 1, 2))
        case = draw(rng, axes, string_padding=False)
        pad = tuple(
            min(rng.randint(0, 3), d * (k - 1) // 2, n)
            for d, k, n in zip(case.dilation, case.weight.shape[2:], case.size, strict=True)
        )
        spans = [d * (k - 1) + 1 for d, k in zip(case.dilation, case.weight.shape[2:], strict=True)]
        if any(n + 2 * e < w for n, e, w in zip(case.size, pad, spans, strict=True)):
            continue
        if any(n % s for n, s in zip(case.size, case.stride, strict=True)):
            continue
        kwargs = {"stride": case.stride, "dilation": case.dilation, "groups": case.groups}
        a = explicit_circular(case.weight, case.size, pad, **kwargs)
        truth = top(a)
        common = {**kwargs, "padding": pad, "padding_mode": "circular", "input_size": case.size}
        least = float(ConvNorm(**common)(case.weight))
        dft = float(dft_norm(case.weight, case.groups, case.dilation, case.size, stride=case.stride, circular=True))
        assert dft >= truth and least >= truth, case
        assert float(ConvNorm(**common, use_dft=False)(case.weight)) >= truth, case
        assert float(ConvNorm(**common, p=1)(case.weight)) >= float(a.abs().sum(0).max()), case
        assert float(ConvNorm(**common, p=math.inf)(case.weight)) >= float(a.abs().sum(1).max()), case
        ratios.append(truth / least if least > 0 else 0.0)
        wrapped += any(w > n for w, n in zip(spans, case.size, strict=True))
        strided += any(s > 1 for s in case.stride)
        indivisible += any(n % d for n, d in zip(case.size, case.dilation, strict=True))
    print(f"circular: truth/bound at most {max(ratios):.6f}; {wrapped} wrapped, {strided} strided, {indivisible} n % d")
    assert max(ratios) > 0.999 and min(wrapped, strided, indivisible) > 5


def test_full_circular_padding_is_exact() -> None:
    torch.manual_seed(2)
    w = torch.randn(3, 2, 3, 3)
    truth = top(explicit_circular(w, (5, 4), (1, 1)))
    assert truth <= float(dft_norm(w, 1, 1, (5, 4), circular=True)) <= truth * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"padding_mode": "reflect", "padding": 1}, "reflect"),
        ({"padding_mode": "replicate", "padding": 1}, "replicate"),
        ({"padding_mode": "circular", "padding": 2}, "outputs repeat"),
        ({"padding_mode": "circular", "padding": 1, "stride": 2}, "pass input_size"),
        ({"padding_mode": "circular", "padding": 1, "stride": 2, "input_size": 5}, "does not divide"),
        ({"padding": "full"}, "'same' or 'valid'"),
        ({"p": 3}, "p=3"),
        ({"input_size": 1}, "does not fit"),
        ({"input_size": (4, 4, 4)}, "input_size has 3 entries"),
    ],
)
def test_what_has_no_bound_is_refused_in_one_line(arguments: dict, says: str) -> None:
    with pytest.raises(CertificationError, match=says) as error:
        ConvNorm(**arguments)(torch.ones(1, 1, 3, 3))
    assert "\n" not in str(error.value)


def test_repeated_circular_outputs_really_break_the_bound() -> None:
    """Why 2·pad > d(k−1) is refused: outputs repeat, and the norm of the kernel matrix's bound is exceeded."""
    w = torch.ones(1, 1, 1)
    truth = top(explicit_circular(w, (3,), (3,)))
    assert truth > 1.5 * float(dft_norm(w, 1, 1, 3, circular=True))


def test_circular_stride_that_does_not_divide_breaks_the_residue_count() -> None:
    """Why s | n is asked for: windows that wrap meet other residues, so m = ⌈k/s⌉ is too small."""
    w = torch.ones(1, 1, 3)
    truth = top(explicit_circular(w, (4,), (1,), stride=3))  # windows {3, 0, 1} and {2, 3, 0}
    assert truth > 1.2 * math.sqrt(overlap(3, 3, 1)) * float(kernel_matrix_norm(w))


def test_dft_at_n_is_no_bound_under_zero_padding() -> None:
    """Trap: the n frequencies of the circular convolution miss the peak that the zero-padded operator reaches."""
    generator = torch.Generator().manual_seed(0)
    deepest = 1.0
    for _ in range(200):
        n = int(torch.randint(2, 6, (), generator=generator))
        w = torch.randn(1, 1, 3, generator=generator)
        truth = top(explicit(w, (n,), padding=1))
        deepest = min(deepest, float(dft_norm(w, 1, 1, n, circular=True)) / truth)
        assert float(dft_norm(w, 1, 1, n)) >= truth
        assert float(dft_norm(w, 1, 1, n, padding=1)) >= truth
    print(f"DFT at n: {deepest:.4f} of the truth")
    assert deepest < 0.95


def test_dft_at_n_plus_k_minus_1_misses_dilation() -> None:
    """Trap: for d = 2 the size must be n + d(k−1); at n + k − 1 windows wrap onto entries of their own."""
    generator = torch.Generator().manual_seed(0)
    deepest = 1.0
    for _ in range(200):
        n = int(torch.randint(2, 7, (), generator=generator))
        w = torch.randn(1, 1, 3, generator=generator)
        truth = top(explicit(w, (n,), dilation=2, padding=4))
        short = float(
            torch.fft.fft(_dilated(w[0, 0].double(), 2), n + 2).abs().max()
        )  # kernel of 5 taps, size n + k − 1
        if n + 2 >= 5:
            deepest = min(deepest, short / truth)
        assert float(dft_norm(w, 1, 2, n)) >= truth
    print(f"DFT at n + k − 1, d = 2: {deepest:.4f} of the truth")
    assert deepest < 0.999


def _dilated(kernel: Tensor, d: int) -> Tensor:
    out = kernel.new_zeros(d * (len(kernel) - 1) + 1)
    out[::d] = kernel
    return out


def test_dft_agrees_with_an_fft_of_the_dilated_kernel() -> None:
    """Independent route: torch.fft of the explicitly dilated kernel at n + d(k−1), where d divides n."""
    torch.manual_seed(3)
    w = torch.randn(3, 2, 3, 2)
    big = torch.zeros(3, 2, 5, 4, dtype=torch.float64)
    big[:, :, ::2, ::3] = w.double()
    symbol = torch.fft.fft2(big, (8 + 4, 6 + 3)).permute(2, 3, 0, 1)
    reference = float(torch.linalg.matrix_norm(symbol, 2).max())
    assert float(dft_norm(w, 1, (2, 3), (8, 6))) == pytest.approx(reference, rel=1e-9)


def test_chunks_do_not_change_the_dft_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    w = torch.randn(4, 2, 3, 3)
    whole = dft_norm(w, 2, 1, (7, 6), stride=2)
    monkeypatch.setattr(_conv_norms, "_CHUNK", 1)
    torch.testing.assert_close(dft_norm(w, 2, 1, (7, 6), stride=2), whole, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("axes", "cases"), [(1, 300), (2, 120), (3, 60)])
def test_transposed_convolution_against_the_matrix(axes: int, cases: int) -> None:
    rng = random.Random(100 + axes)
    ratios: dict[float, list[float]] = {1: [], 2: [], math.inf: [], -2: []}
    while len(ratios[2]) < cases:
        case = draw(rng, axes, string_padding=False)
        size = tuple(min(n, 5 if axes < 3 else 2) for n in case.size)
        extra = tuple(rng.randrange(max(s, d)) for s, d in zip(case.stride, case.dilation, strict=True))
        spans = [d * (k - 1) + 1 for d, k in zip(case.dilation, case.weight.shape[2:], strict=True)]
        pads = case.padding
        assert not isinstance(pads, str)
        rows = zip(size, case.stride, spans, pads, extra, strict=True)
        if any((n - 1) * s + w - 2 * e + o < 1 for n, s, w, e, o in rows):
            continue
        kwargs: dict = {**case.kwargs(), "output_padding": extra}
        x = basis(case.weight.shape[0], size)
        a = TRANSPOSE[axes](x, case.weight.double(), **kwargs).flatten(1).T
        truths = {1: a.abs().sum(0).max(), 2: top(a), math.inf: a.abs().sum(1).max(), -2: top(a)}
        for p, truth in truths.items():
            sized: dict = {"input_size": size} if p == -2 else {}
            bound = float(ConvNorm(transposed=True, **kwargs, p=abs(p), **sized)(case.weight))
            assert bound >= float(truth), (p, case, extra)
            ratios[p].append(float(truth) / bound if bound else 0.0)
    for p, values in ratios.items():
        print(f"transposed {axes}-D p={p}: truth/bound at most {max(values):.6f}")
        assert max(values) > 0.999


def test_p_inf_of_all_ones_is_the_area() -> None:
    assert float(ConvNorm(p=math.inf)(torch.ones(1, 1, 3, 3))) == pytest.approx(9, rel=1e-12)
    assert float(row_sum_norm(torch.ones(1, 1, 3, 3))) >= 9
    assert float(column_sum_norm(torch.ones(2, 1, 3, 3), stride=3)) == pytest.approx(2, rel=1e-12)


def test_nan_weights_give_nan_and_no_sum_is_lost_in_bfloat16() -> None:
    w = torch.ones(1, 1, 3, 3)
    w[0, 0, 1, 1] = math.nan
    for p in (1, 2, math.inf):
        assert math.isnan(float(ConvNorm(p=p, input_size=5)(w)))
    cast = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert float(ConvNorm(padding=1, input_size=4)(cast)) >= top(explicit(cast, (4, 4), padding=1))
