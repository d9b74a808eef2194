"""Property tests of every loss: the gradient is right, and no input or label takes it beyond its bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.errors import WeightclipError
from weightclip.losses import (
    L1,
    MSE,
    BCEWithLogits,
    Cosine,
    CrossEntropy,
    Huber,
    Loss,
    MultiMargin,
    PerRecordLoss,
    SmoothL1,
)

INF = math.inf
DUAL = {2: 2, INF: 1, 1: INF}
WEIGHTS = (0.2, 1.5, 0.7, 3.0)


def per_record_ce(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


# name -> (loss, output shape, kind of labels, is `gradient` a gradient field, does the bound come close in p = 2)
CASES: dict[str, tuple[Loss, tuple[int, ...], str, bool, bool]] = {
    "ce": (CrossEntropy(), (4,), "index", True, True),
    "ce two": (CrossEntropy(), (2,), "index", True, True),
    "ce many": (CrossEntropy(), (100,), "index", True, True),
    "ce positions": (CrossEntropy(), (4, 3, 2), "index", True, True),
    "ce soft": (CrossEntropy(), (4,), "soft", True, True),
    "ce cold": (CrossEntropy(temperature=0.5), (4,), "index", True, True),
    "ce hot scaled": (CrossEntropy(temperature=3.0, scale_by_temperature=True), (4,), "index", True, True),
    "ce smooth": (CrossEntropy(smoothing=0.3), (4,), "index", True, True),
    "ce very smooth": (CrossEntropy(smoothing=0.97), (3,), "index", True, True),
    "ce smooth soft": (CrossEntropy(smoothing=0.3), (4,), "soft", True, True),
    "ce weights": (CrossEntropy(class_weights=WEIGHTS), (4,), "index", True, True),
    "ce weights soft positions": (CrossEntropy(class_weights=WEIGHTS), (4, 3), "soft", True, True),
    "ce weights smooth": (CrossEntropy(class_weights=WEIGHTS, smoothing=0.4), (4,), "index", True, True),
    "ce cap": (CrossEntropy(cap=0.3), (4,), "index", False, True),
    "ce cap two": (CrossEntropy(cap=0.3), (2,), "index", True, True),
    "ce cap two smooth": (CrossEntropy(cap=0.1, smoothing=0.2, temperature=2.0), (2,), "soft", True, True),
    "ce cap soft": (CrossEntropy(cap=0.3), (10,), "soft", False, True),
    "ce cap smooth": (CrossEntropy(cap=0.3, smoothing=0.2), (10,), "index", False, True),
    "ce cap positions": (CrossEntropy(cap=0.2, class_weights=WEIGHTS), (4, 5), "index", False, True),
    "ce useless cap": (CrossEntropy(cap=5.0), (4,), "index", True, True),
    "ce envelope": (CrossEntropy(cap=0.3, envelope=True), (4,), "index", True, True),
    "ce envelope soft": (CrossEntropy(cap=0.1, envelope=True), (5,), "soft", True, True),
    "ce envelope all": (
        CrossEntropy(cap=0.15, envelope=True, smoothing=0.1, class_weights=WEIGHTS, temperature=0.7),
        (4, 3),
        "index",
        True,
        True,
    ),
    "bce": (BCEWithLogits(), (), "unit", True, True),
    "bce one": (BCEWithLogits(pos_weight=4.0), (1,), "unit", True, True),
    "bce outputs": (BCEWithLogits(pos_weight=(0.5, 2.0, 1.0), weight=(1.0, 0.3, 2.0)), (3,), "unit", True, True),
    "bce grid": (BCEWithLogits(pos_weight=((2.0,), (3.0,))), (2, 3), "unit", True, True),
    "bce cap": (BCEWithLogits(cap=0.2), (1,), "unit", True, True),
    "bce cap weights": (BCEWithLogits(cap=0.4, pos_weight=3.0, weight=0.5), (), "unit", True, True),
    "bce warm": (BCEWithLogits(temperature=0.4), (1,), "unit", True, True),
    "bce warm scaled": (BCEWithLogits(temperature=0.4, scale_by_temperature=True), (1,), "unit", True, True),
    "bce warm cap": (BCEWithLogits(cap=0.3, temperature=0.4, pos_weight=3.0), (1,), "unit", True, True),
    "bce cool cap": (BCEWithLogits(cap=0.3, temperature=3.0, scale_by_temperature=True), (), "unit", True, True),
    "bce cap outputs": (BCEWithLogits(cap=0.2), (3,), "unit", False, True),
    "margin": (MultiMargin(), (4,), "index", True, True),
    "margin weights": (MultiMargin(margin=0.3, class_weights=WEIGHTS), (4,), "index", True, True),
    "cosine": (Cosine(0.5), (4,), "index", True, True),
    "cosine embedded": (Cosine(0.5), (4,), "real", True, True),
    "huber": (Huber(0.7), (3,), "real", True, True),
    "huber one": (Huber(0.7), (), "real", True, True),
    "smooth l1": (SmoothL1(0.2), (3, 2), "real", True, True),
    "l1": (L1(), (3,), "real", True, True),
    "mse": (MSE(output_bound=2.0, target_bound=1.5), (3,), "real", True, True),
    "mse one": (MSE(output_bound=2.0, target_bound=1.5), (1,), "real", True, True),
    "own": (PerRecordLoss(per_record_ce, bound=1.5), (4,), "index", True, False),
    "own false claim": (PerRecordLoss(per_record_ce, bound=0.5), (4,), "index", False, True),
}
EACH = pytest.mark.parametrize("name", list(CASES))


def labels(kind: str, n: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if kind == "index":
        return torch.randint(shape[0], (n, *shape[1:]), generator=generator)
    if kind == "soft":
        sharp = 5 * torch.randn(n, 1, *[1] * (len(shape) - 1), generator=generator, dtype=torch.float64).abs()
        return torch.softmax(sharp * torch.randn(n, *shape, generator=generator, dtype=torch.float64), 1)
    y = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return (y > 0).double() * 0.8 + 0.1 * torch.rand(y.shape, generator=generator) if kind == "unit" else 2 * y


def adversarial(loss: Loss, kind: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random, huge, one-hot and tied logits, with hard, soft and extreme labels; the steepest are climbed further."""
    gen = torch.Generator().manual_seed(1)
    y = labels(kind, 600, shape, gen)
    z = torch.randn(600, *shape, generator=gen, dtype=torch.float64)
    z *= torch.logspace(-3, 4, 600, dtype=torch.float64).reshape(-1, *[1] * len(shape))
    z[:150] = torch.sign(z[:150]) * 1e3
    if shape:
        z[150:300] = 0
        z[150:300].scatter_(1, torch.randint(shape[0], (150, 1, *shape[1:]), generator=gen), 300.0)
        z[300:320] = 0
    if kind == "soft":
        y[::2] = F.one_hot(y[::2].argmax(1), shape[0]).movedim(-1, 1).double()
    if kind == "unit":
        y[::2] = (y[::2] > 0.5).double()
        z[::2] = torch.sign(0.5 - y[::2]) * z[::2].abs()  # logits opposite to their labels
    if kind == "real":
        y[::3] = torch.sign(y[::3]) * 1e4
        z[::2] = -torch.sign(y[::2]) * z[::2].abs()  # outputs opposite to their targets
    return z, y


def norms(g: Tensor, p: float) -> Tensor:
    return torch.linalg.vector_norm(g.double().reshape(len(g), -1), ord=DUAL[p], dim=1)


@EACH
@pytest.mark.parametrize("p", [1, 2, INF])
def test_bound_holds_and_is_near(name: str, p: float) -> None:
    loss, shape, kind, _, tight = CASES[name]
    bound = loss.bound(shape, p)
    z, y = adversarial(loss, kind, shape)
    for dtype in (torch.float64, torch.float32):
        assert norms(loss.gradient(z.to(dtype), y), p).max() <= bound
    for low in (torch.bfloat16, torch.float16):
        z16 = z.clamp(-6e4, 6e4).to(low)
        assert loss.gradient(z16, y).dtype == low
        assert norms(loss.gradient(z16, y), p).max() <= bound
    if tight and p == 2:
        assert norms(loss.gradient(z, y), 2).max() > 0.95 * bound


def test_cap_holds_over_a_million_outputs() -> None:
    gen = torch.Generator().manual_seed(13)
    shape = (21, 256, 256)
    z, y = 3 * torch.randn(1, *shape, generator=gen), torch.randint(21, (1, 256, 256), generator=gen)
    soft = torch.rand(1, *shape, generator=gen)
    loss = CrossEntropy(cap=1e-3)
    for labels_ in (y, soft):
        for p in (1, 2, INF):
            assert norms(loss.gradient(z, labels_), p).item() <= loss.bound(shape, p)


@EACH
def test_bound_holds_under_ascent(name: str) -> None:
    loss, shape, kind, _, _ = CASES[name]
    gen = torch.Generator().manual_seed(2)
    y = labels(kind, 32, shape, gen)
    for p in (1, 2, INF):
        z = (2 * torch.randn(32, *shape, generator=gen, dtype=torch.float64)).requires_grad_()
        for _ in range(8):
            norm = norms(loss.gradient(z, y), p)
            if not norm.requires_grad:
                break
            (step,) = torch.autograd.grad(norm.sum(), z, allow_unused=True, materialize_grads=True)
            z = (z + 3 * torch.sign(torch.nan_to_num(step))).detach().requires_grad_()
        assert norms(loss.gradient(z.detach(), y), p).max() <= loss.bound(shape, p)


@EACH
def test_gradient_is_that_of_values(name: str) -> None:
    loss, shape, kind, field, _ = CASES[name]
    gen = torch.Generator().manual_seed(3)
    for scale in (0.3, 3.0, 30.0):
        z = scale * torch.randn(64, *shape, generator=gen, dtype=torch.float64)
        y = labels(kind, 64, shape, gen)
        x = z.clone().requires_grad_()
        (auto,) = torch.autograd.grad(loss.values(x, y).sum(), x)
        ours = loss.gradient(z, y)
        if field:
            torch.testing.assert_close(ours, auto, atol=1e-8, rtol=0)
            u = torch.randn(z.shape, generator=gen, dtype=torch.float64)
            slope = (loss.values(z + 1e-5 * u, y) - loss.values(z - 1e-5 * u, y)) / 2e-5
            exact = (ours * u).reshape(64, -1).sum(1)
            assert ((slope - exact).abs() < 1e-5 * (1 + exact.abs())).float().mean() > 0.95  # all but kinks
        else:  # capped: parallel to the loss's own gradient, and the same where that is short enough
            assert loss.cap is not None
            dot, length = (ours * auto).reshape(64, -1).sum(1), norms(auto, 2)
            torch.testing.assert_close(dot, norms(ours, 2) * length)
            if name != "ce cap soft":  # whose l1 norm is kept too
                torch.testing.assert_close(norms(ours, 2), length.clamp(max=loss.cap))


@EACH
def test_bad_records_contribute_zero_and_leave_others_alone(name: str) -> None:
    loss, shape, kind, _, _ = CASES[name]
    gen = torch.Generator().manual_seed(4)
    z, y = torch.randn(6, *shape, generator=gen), labels(kind, 6, shape, gen)
    bad, bad_y = z.clone(), y.clone()
    for i, value in enumerate((math.nan, INF, -INF)):
        bad[i].reshape(-1)[0] = value
    own = isinstance(loss, PerRecordLoss)  # what a user's function does with bad labels is its own affair
    if not own:
        bad_y[3].reshape(-1)[-1] = {"index": 1000, "soft": -0.5, "unit": 1.5, "real": math.nan}[kind]
        bad_y[4].reshape(-1)[-1] = -7 if kind == "index" else math.nan
    g, v = loss.gradient(bad, bad_y), loss.values(bad, bad_y)
    last = 3 if own else 5
    assert (g[:last] == 0).all() and (v[:last] == 0).all()
    torch.testing.assert_close(g[last:], loss.gradient(z, y)[last:])
    torch.testing.assert_close(v[last:], loss.values(z, y)[last:])
    assert norms(loss.gradient(z, y), 2).max() > 0


@EACH
def test_records_are_independent_and_may_be_none(name: str) -> None:
    loss, shape, kind, _, _ = CASES[name]
    gen = torch.Generator().manual_seed(5)
    z, y = 3 * torch.randn(7, *shape, generator=gen), labels(kind, 7, shape, gen)
    g, v = loss.gradient(z, y), loss.values(z, y)
    assert g.shape == z.shape and v.shape == (7,)
    z2, y2 = z.clone(), y.clone()
    z2[3], y2[3] = -100 * z[3], y[0]
    keep = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(loss.gradient(z2, y2)[keep], g[keep])
    torch.testing.assert_close(loss.gradient(z[keep], y[keep]), g[keep])
    torch.testing.assert_close(loss.values(z2, y2)[keep], v[keep])
    assert loss.gradient(z[:0], y[:0]).shape == z[:0].shape
    assert loss.values(z[:0], y[:0]).shape == (0,)
    torch.testing.assert_close(loss(z, y), v.mean())


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("own")])
def test_vmap(name: str) -> None:
    loss, shape, kind, _, _ = CASES[name]
    gen = torch.Generator().manual_seed(6)
    z, y = torch.randn(3, 5, *shape, generator=gen), torch.stack([labels(kind, 5, shape, gen) for _ in range(3)])
    together = torch.func.vmap(loss.gradient)(z, y)
    torch.testing.assert_close(together, torch.stack([loss.gradient(a, b) for a, b in zip(z, y, strict=True)]))


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("s", [0.0, 0.1, 0.5, 0.9])
def test_cross_entropy_formulas(classes: int, s: float) -> None:
    loss = CrossEntropy(smoothing=s)
    assert loss.bound((classes,)) == pytest.approx(math.sqrt(1 + (1 - s) ** 2 - s**2 / classes))
    assert loss.bound((classes,), INF) == pytest.approx(2 * (1 - s / classes))
    assert loss.bound((classes,), 1) == pytest.approx(1 - s / classes)
    assert loss.bound((classes, 4, 4)) == pytest.approx(loss.bound((classes,)) / 4)
    tau = replace(loss, temperature=2.5)
    assert tau.bound((classes,)) == pytest.approx(loss.bound((classes,)) / 2.5)
    assert replace(tau, scale_by_temperature=True).bound((classes,)) == pytest.approx(loss.bound((classes,)))
    heavy = replace(loss, class_weights=[4.0] * classes)
    assert heavy.bound((classes,)) == pytest.approx(4 * loss.bound((classes,)))


@pytest.mark.parametrize("p", [1, 2, INF])
@pytest.mark.parametrize("s", [0.0, 0.4, 1.0])
def test_weighted_bound_is_the_exact_supremum(p: float, s: float) -> None:
    gen = torch.Generator().manual_seed(7)
    for classes in (2, 3, 6):
        w = torch.rand(classes, generator=gen, dtype=torch.float64) * 3
        loss = CrossEntropy(class_weights=w, smoothing=s)
        pairs = torch.cartesian_prod(torch.arange(classes), torch.arange(classes))  # every vertex p, every label
        z = 1e3 * F.one_hot(pairs[:, 0], classes).double()
        assert norms(loss.gradient(z, pairs[:, 1]), p).max() == pytest.approx(loss.bound((classes,), p))


def test_other_formulas() -> None:
    assert CrossEntropy().bound((10,)) == pytest.approx(math.sqrt(2))
    assert CrossEntropy(cap=0.3).bound((10,)) == 0.3
    assert CrossEntropy(cap=0.3).bound((10,), INF) == pytest.approx(0.6 * math.sqrt(0.9))
    assert CrossEntropy(cap=0.3).bound((10,), 1) == pytest.approx(0.3 * math.sqrt(0.9))
    assert CrossEntropy(cap=9).bound((10,), INF) == 2
    assert BCEWithLogits().bound((1,)) == 1
    assert BCEWithLogits().bound((9,)) == pytest.approx(1 / 3)
    assert BCEWithLogits(pos_weight=3.0).bound(()) == 3
    assert BCEWithLogits(pos_weight=0.5).bound(()) == 1
    assert MultiMargin().bound((5,)) == pytest.approx(math.sqrt(4 / 5))
    assert Huber(0.5).bound((4,)) == pytest.approx(0.25)
    assert Cosine(0.25).bound((4,)) == pytest.approx(4)
    assert MSE(3.0, 2.0).bound((1,)) == pytest.approx(10)
    assert PerRecordLoss(per_record_ce, bound=2.0).bound((9,), INF) == pytest.approx(6)
    with pytest.raises(WeightclipError, match="p = 3"):
        L1().bound((2,), 3)


def test_index_labels_meet_the_capped_dual_bounds() -> None:
    # All wrong classes equally likely: l1/l2 and l∞/l2 are the largest possible.
    z = torch.tensor([[-50.0, 0, 0, 0, 0]], dtype=torch.float64)
    loss = CrossEntropy(cap=0.2)
    for p in (1, INF):
        assert norms(loss.gradient(z, torch.tensor([0])), p).item() == pytest.approx(loss.bound((5,), p))


def test_positions_ignored_and_weighted_labels_keep_the_count_fixed() -> None:
    gen = torch.Generator().manual_seed(9)
    z, y = torch.randn(5, 4, 6, generator=gen), torch.randint(4, (5, 6), generator=gen)
    y[0, :4], y[1] = -100, -100
    w = torch.tensor(WEIGHTS)
    native = F.cross_entropy(z, y, weight=w, ignore_index=-100, reduction="none", label_smoothing=0.2)
    loss = CrossEntropy(class_weights=w, smoothing=0.2)
    torch.testing.assert_close(loss.values(z, y), native.mean(1))
    g = loss.gradient(z, y)
    assert (g[0, :, :4] == 0).all() and (g[1] == 0).all() and (g[0, :, 4:] != 0).all()
    zero = replace(loss, ignore_index=2)
    assert (zero.gradient(z[2:], y[2:]).movedim(1, -1)[y[2:] == 2] == 0).all()
    y[2, 3] = 4  # one bad label spoils its record, and only that
    assert (loss.gradient(z, y)[2] == 0).all()
    torch.testing.assert_close(loss.gradient(z, y)[3:], g[3:])


def test_probabilities_are_normalised() -> None:
    gen = torch.Generator().manual_seed(10)
    z, y = torch.randn(8, 3, generator=gen), torch.rand(8, 3, generator=gen)
    loss = CrossEntropy()
    torch.testing.assert_close(loss.gradient(z, 1e6 * y), loss.gradient(z, y / y.sum(1, keepdim=True)))
    assert (loss.gradient(z, 0 * y) == 0).all()


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: CrossEntropy(temperature=0), "temperature"),
        (lambda: CrossEntropy(smoothing=1.5), "smoothing"),
        (lambda: CrossEntropy(cap=-1), "cap"),
        (lambda: CrossEntropy(envelope=True), "cap=B"),
        (lambda: CrossEntropy(class_weights=(1.0, -1.0)), "class_weights"),
        (lambda: CrossEntropy(class_weights=2.0), "class_weights"),
        (lambda: CrossEntropy(class_weights=(1.0, 2.0)).bound((3,)), "class weights"),
        (lambda: CrossEntropy().bound((1,)), "BCEWithLogits"),
        (lambda: CrossEntropy().gradient(torch.zeros(4, 3), torch.zeros(4)), "probabilities"),
        (lambda: CrossEntropy().gradient(torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.long)), "class indices"),
        (lambda: BCEWithLogits(pos_weight=(1.0, 2.0)).bound(()), "pos_weight"),
        (lambda: BCEWithLogits(weight=(1.0,) * 4).gradient(torch.zeros(4, 1), torch.zeros(4)), "weight"),
        (lambda: Huber(-1.0), "delta"),
        (lambda: Cosine(0.0), "floor"),
        (lambda: L1().gradient(torch.zeros(4, 2), torch.zeros(4)), "one target per output"),
        (lambda: MultiMargin().gradient(torch.zeros(4, 2), torch.zeros(4)), "class indices"),
    ],
)
def test_misuse_is_one_clear_line(make: object, hint: str) -> None:
    with pytest.raises(WeightclipError, match=hint) as error:
        make()  # type: ignore[operator]
    assert "\n" not in str(error.value)


def test_columns_and_vectors_are_never_broadcast() -> None:
    gen = torch.Generator().manual_seed(12)
    z, y = torch.randn(5, 1, generator=gen), torch.rand(5, generator=gen)
    for loss in (L1(), BCEWithLogits(), MSE(1.0, 1.0)):
        torch.testing.assert_close(loss.gradient(z, y).squeeze(1), loss.gradient(z.squeeze(1), y))


def test_losses_are_values() -> None:
    assert CrossEntropy(class_weights=torch.tensor([1.0, 2.0])) == CrossEntropy(class_weights=[1, 2])
    with pytest.raises(AttributeError):
        CrossEntropy().cap = 1.0  # type: ignore[misc]
