"""Heads on fixed features: exact sums, bounds that hold for hostile records, the engine's gradient, the noise's law."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.bounds import operator_norm_bound
from weightclip_studies.images import _product
from weightclip_studies.images._check import _on, largest_shares
from weightclip_studies.images._engine import audit_head, head_bounds, head_loss, head_model
from weightclip_studies.images._heads import HeadTrainer, noise_seed
from weightclip_studies.images._product import (
    Features,
    collect,
    encode,
    integer_product,
    integers_add_up,
    outputs,
    quantise,
)
from weightclip_studies.images._search import METHODS, proposals
from weightclip_studies.images._settings import ALLOCATIONS, HeadSettings

SETTINGS = {
    "linear": HeadSettings(hidden=0, loss_cap=0.3),
    "plain-linear": HeadSettings(hidden=0),
    "weights": HeadSettings(hidden=6, loss_cap=0.3, weight_norm=2.0),
    "free-weights": HeadSettings(hidden=6, loss_cap=0.3),
    "sphere": HeadSettings(hidden=6, loss_cap=0.3, weight_norm=2.0, sphere=True, allocation="equal"),
    "factors": HeadSettings(hidden=6, loss_cap=0.3, cotangent_radius=0.1, layer_radius=1.0),
    "layer-caps": HeadSettings(hidden=6, layer_caps=(0.1, 0.3), allocation="least-variance"),
    "flat": HeadSettings(hidden=6, joint_cap=(0.2, 0.2)),
    "joint": HeadSettings(hidden=6, joint_cap=(0.1, 0.4), loss_cap=0.5, temperature=0.5),
}
SETTINGS = {name: replace(s, batch=40, steps=4) for name, s in SETTINGS.items()}


def features(records: int = 60, width: int = 20, seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, width, generator=generator)
    codes = encode(x / x.norm(dim=1, keepdim=True))
    return collect(codes, torch.randint(0, 10, (records,), generator=generator))


def loud(trainer: HeadTrainer, scale: float = 30.0) -> HeadTrainer:
    """Weights far from where training starts, so that every limit is met; ClipWeights brings them back."""
    trainer.flat.copy_(scale * torch.randn(trainer.flat.shape, generator=torch.Generator().manual_seed(3)))
    trainer._clip()
    return trainer


# -- the integer grid ----------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 80), st.sampled_from(["normal", "sparse", "constant", "one"]))
def test_encoded_records_stay_in_the_unit_ball(seed: int, width: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, width, generator=generator)
    if kind == "sparse":
        x = x * (torch.rand(5, width, generator=generator) < 0.1)
    elif kind == "constant":
        x = torch.ones(5, width) * x[:, :1].sign()
    elif kind == "one":
        x = torch.nn.functional.one_hot(torch.arange(5) % width, width).float()
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-12)
    data = collect(encode(x), torch.zeros(5))
    exact = data.codes.double().norm(dim=1) * data.scale
    assert float(exact.max()) <= 1.0
    assert bool((data.norms[:-1].double() >= exact[:-1]).all())
    assert data.width % 16 == 0 and not data.codes[-1].any()


def test_encoding_keeps_the_directions() -> None:
    x = torch.randn(20, 400, generator=torch.Generator().manual_seed(0))
    x = x / x.norm(dim=1, keepdim=True)
    data = collect(encode(x), torch.zeros(20))
    cosine = torch.nn.functional.cosine_similarity(data.values(slice(0, 20))[:, :400], x)
    assert float(cosine.min()) > 0.999


def test_a_record_outside_the_ball_is_refused() -> None:
    with pytest.raises(wc.WeightclipError, match="outside the unit ball"):
        collect(torch.full((1, 16), 127, dtype=torch.int8), torch.zeros(1))


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 12))
def test_integer_products_are_exact(seed: int, records: int, units: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-16383, 16384, (records, units), generator=generator)
    x = torch.randint(-127, 128, (records, 16), dtype=torch.int8, generator=generator)
    assert torch.equal(integer_product(codes.double(), x), (codes.t() @ x.long()).double())


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 12))
def test_outputs_are_near_and_hang_on_their_own_record(seed: int, records: int, units: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (records, 64), dtype=torch.int8, generator=generator)
    w = torch.randn(units, 64, generator=generator) * 10.0 ** torch.randint(-6, 6, (units, 1), generator=generator)
    exact, found = x.double() @ w.double().t(), outputs(x, w)
    room = 64 * 127 * w.abs().amax(1).double() * 2.0**-20
    assert bool(((found.double() - exact).abs() <= room + 1e-12).all())
    if integers_add_up():
        assert all(torch.equal(outputs(x[i:], w), found[i:]) for i in range(records))
    assert not outputs(x, torch.zeros_like(w)).any()


def test_wide_outputs_stay_within_int32() -> None:
    width = _product._COLUMNS + 32
    x, w = torch.full((2, width), 127, dtype=torch.int8), torch.ones(1, width)
    assert outputs(x, w).flatten().tolist() == pytest.approx([127.0 * width] * 2, rel=1e-5)
    assert _product._COLUMNS * 127 * 127 < 2**31


def test_products_where_integers_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some processors cut sums of two int8 products to sixteen bits: double precision is taken there."""
    exact = _product.int8_product
    cut = lambda a, b: exact(a, b).clamp(-(2**15), 2**15 - 1)  # noqa: E731
    codes = torch.full((300, 2), 16383.0, dtype=torch.float64)
    x, w = torch.full((300, 16), 127, dtype=torch.int8), torch.ones(3, 16)
    monkeypatch.setattr(_product, "int8_product", cut)
    integers_add_up.cache_clear()
    try:
        assert not integers_add_up()
        assert torch.equal(integer_product(codes, x), (codes.long().t() @ x.long()).double())
        assert torch.equal(outputs(x, w), x.float() @ w.t())
    finally:
        integers_add_up.cache_clear()


@given(st.integers(0, 10_000), st.floats(1e-6, 1e6))
def test_quantised_cotangents_never_grow(seed: int, bound: float) -> None:
    delta = torch.randn(7, 9, generator=torch.Generator().manual_seed(seed)) * 3 * bound
    codes, step = quantise(delta, torch.tensor(bound, dtype=torch.float64))
    value = codes * step
    assert float(codes.abs().max()) <= 16383 and torch.equal(codes, codes.round())
    assert bool((value.abs() <= delta.double().abs() * (1 + 1e-12)).all())
    inside = delta.double().abs() <= bound
    assert bool(((value - delta.double()).abs()[inside] <= step * (1 + 1e-9)).all())


# -- sensitivities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_no_record_contributes_more_than_its_share(name: str) -> None:
    for scale in (0.1, 30.0):
        shares = largest_shares(loud(HeadTrainer(features(), SETTINGS[name], 1.0, 0), scale), 12)
        assert all(share <= 1 + 1e-9 for share in shares.values()), shares
        assert shares["alone"] > 0.05  # the records do reach the bound's neighbourhood


@pytest.mark.parametrize("name", ["linear", "factors", "layer-caps", "flat"])
def test_the_check_sees_a_bound_that_is_too_small(name: str) -> None:
    trainer = loud(HeadTrainer(features(), SETTINGS[name], 1.0, 0))
    limit = trainer._limit
    trainer._limit = lambda cotangents, factors: (limit(cotangents, factors)[0], 0.8 * limit(cotangents, factors)[1])  # type: ignore[method-assign]
    assert max(largest_shares(trainer, 12).values()) > 1.05


def test_the_bound_of_the_weights_is_the_certificate() -> None:
    s = SETTINGS["free-weights"]
    trainer = loud(HeadTrainer(features(), s, 1.0, 0))
    model = head_model(trainer.data.width, s)
    copy_weights(trainer, model)
    certificate = wc.certify(model, head_loss(s), example=torch.zeros(1, trainer.data.width), bounds=head_bounds(s))
    delta = trainer.contribution(torch.arange(4)).sensitivities
    for mine, row in zip(delta.tolist(), certificate.rows, strict=True):
        assert mine == pytest.approx(row.sensitivity, rel=1e-3)


@pytest.mark.parametrize("name", ["weights", "sphere"])
def test_clipped_weights_have_the_norm_the_bound_uses(name: str) -> None:
    trainer = loud(HeadTrainer(features(), SETTINGS[name], 1.0, 0))
    for k, (w, _) in enumerate(trainer.layers):
        norm = float(operator_norm_bound(w))
        assert norm <= float(trainer._gain(k)) and norm == pytest.approx(2.0, rel=1e-4)


def test_a_record_that_is_not_finite_contributes_nothing() -> None:
    data = features()
    data.norms[0] = math.nan
    trainer = HeadTrainer(data, SETTINGS["flat"], 1.0, 0)
    sums = trainer.contribution(torch.tensor([0])).sums
    assert all(float(part.abs().sum()) == 0 for layer in sums for part in layer)


# -- the step ------------------------------------------------------------------------------------------------------


def copy_weights(trainer: HeadTrainer, model: torch.nn.Module) -> None:
    with torch.no_grad():
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        for (w, b), layer in zip(trainer.layers, linear, strict=True):
            layer.weight.copy_(w)
            layer.bias.copy_(b)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_engine_takes_the_same_step(name: str) -> None:
    s = replace(SETTINGS[name], batch=60)  # q = 1: every record is drawn
    data = features()
    trainer = HeadTrainer(data, s, 0.0, 0)
    model = head_model(data.width, s)
    copy_weights(trainer, model)
    loader = DataLoader(TensorDataset(data.values(slice(0, 60)), data.labels[:-1]), batch_size=60)
    engine = wc.PrivacyEngine()
    model, optimizer, loader, criterion = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), data_loader=loader,
        criterion=head_loss(s), noise_multiplier=0.0, bounds=head_bounds(s), allocation=ALLOCATIONS[s.allocation],
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    trainer.step()
    mine = trainer.gradient
    theirs = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    # truncation to fifteen bits moves each record by at most one step an entry, 2 Delta/16383
    step = 2 * float(trainer.sensitivities[0]) / 16383 * math.sqrt(trainer.shapes[0][0]) * math.hypot(1, 1)
    assert float((mine - theirs).norm()) < step + 1e-6 and step < 0.02 * float(theirs.norm())
    assert trainer.b == engine.expected_batch_size == 60


@pytest.mark.parametrize("name", ["factors", "flat", "linear"])
def test_noise_has_the_law_that_is_accounted(name: str) -> None:
    s, sigma = SETTINGS[name], 2.0
    trainer = HeadTrainer(features(width=400), s, sigma, 0)
    seen: list[list[torch.Tensor]] = [[] for _ in range(2 * len(trainer.gradients))]
    for _ in range(40):
        trainer.step(torch.full((16,), len(trainer.data)))  # an empty draw: pure noise
        for k, (w, b) in enumerate(trainer.gradients):
            unit = trainer.b / float(trainer.scales[k])
            seen[2 * k].append(w.flatten() * unit)
            seen[2 * k + 1].append(b * (unit * s.bias_scale))
    for parts in seen:
        z = torch.cat(parts)
        assert abs(float(z.std()) - 1) < 5 / math.sqrt(2 * len(z)) and abs(float(z.mean())) < 5 / math.sqrt(len(z))
        later = torch.cat([*parts[1:], parts[0]])  # nor do two steps share any
        assert abs(float((z * later).mean())) < 5 / math.sqrt(len(z))
    if s.joint_cap is None:
        assert float((trainer.sensitivities / trainer.scales).square().sum()) == pytest.approx(1 / sigma**2, rel=1e-6)
    else:
        assert trainer.scales.tolist() == pytest.approx([sigma * t for t in s.joint_cap], rel=1e-4)


def test_no_two_runs_share_noise() -> None:
    def noise(settings: HeadSettings, seed: int = 0, stream: str = "mnist/final/flat/1.0") -> torch.Tensor:
        trainer = HeadTrainer(features(), settings, 1.0, seed, stream)
        trainer.step(torch.full((16,), len(trainer.data)))
        return trainer.gradients[-1][0].flatten() / trainer.scales[-1].float()

    base = noise(SETTINGS["flat"])
    assert torch.equal(base, noise(SETTINGS["flat"]))
    others = [
        noise(SETTINGS["flat"], seed=1), noise(SETTINGS["flat"], stream="cifar10/final/flat/1.0"),
        noise(SETTINGS["joint"]), noise(replace(SETTINGS["flat"], steps=5)),
    ]  # fmt: skip
    for other in others:
        cosine = torch.nn.functional.cosine_similarity(base, other, dim=0)
        assert abs(float(cosine)) < 5 / base.numel() ** 0.5
    assert noise_seed(SETTINGS["flat"], 1.0, 0, "a") != noise_seed(SETTINGS["flat"], 2.0, 0, "a")


@pytest.mark.parametrize("name", ["weights", "sphere", "flat"])
def test_forgotten_steps_leave_nothing_behind(name: str) -> None:
    trainer = HeadTrainer(features(), replace(SETTINGS[name], learning_rate=0.5), 1.0, 0)
    rows = torch.arange(16)
    state, before = [x.clone() for x in trainer._state()], trainer.contribution(rows)
    for _ in range(2):
        trainer.step()
    trainer._restore(state)
    after = trainer.contribution(rows)
    assert torch.equal(before.sensitivities, after.sensitivities)
    assert all(
        torch.equal(x, y) for a, b in zip(before.sums, after.sums, strict=True) for x, y in zip(a, b, strict=True)
    )


def test_the_input_norm_is_that_of_the_weights_as_cast() -> None:
    trainer = HeadTrainer(features(), SETTINGS["free-weights"], 1.0, 0)
    w = trainer.layers[0][0]
    w.fill_(1 + 2.0**-8 + 2.0**-12)  # every entry rounds up to 1 + 2^-7
    trainer.half = torch.bfloat16
    cast = float(torch.linalg.matrix_norm(w.to(torch.bfloat16).double(), 2))
    assert cast > 1.003 * float(torch.linalg.matrix_norm(w.double(), 2))
    assert float(trainer._input_gain()) >= cast * (1 + 2.0**-8)


def test_an_output_above_the_bound_of_the_weights_is_scaled_down() -> None:
    trainer = loud(HeadTrainer(features(), SETTINGS["weights"], 1.0, 0))
    forward = trainer._forward

    def careless(x: torch.Tensor, layers: list) -> tuple[torch.Tensor, torch.Tensor | None]:
        z, hidden = forward(x, layers)
        return z, None if hidden is None else 50 * hidden

    trainer._forward = careless  # type: ignore[method-assign]
    assert largest_shares(trainer, 12)["layer_1"] <= 1 + 1e-9


def test_draws_are_independent_coins() -> None:
    trainer = HeadTrainer(features(records=400), replace(SETTINGS["linear"], batch=100), 1.0, 0)
    draws = []
    for _ in range(200):
        trainer.prepare()
        draws.append(trainer.draw())
    counts = torch.tensor([int((d < 400).sum()) for d in draws]).double()
    assert counts.mean() == pytest.approx(100, abs=4 * (75 / 200) ** 0.5)
    assert counts.var() == pytest.approx(75, rel=0.5)
    for d in draws[:20]:
        real = d[d < 400]
        assert len(real.unique()) == len(real) and bool((d[len(real) :] == 400).all())
    often = torch.cat([d[d < 400] for d in draws]).bincount(minlength=400).double()
    assert float((often - 50).abs().max()) < 6 * (200 * 0.25 * 0.75) ** 0.5


def test_a_draw_that_does_not_fit_is_refused() -> None:
    trainer = HeadTrainer(features(), SETTINGS["linear"], 1.0, 0)
    trainer.rows = 2
    trainer.prepare()
    trainer.draw()
    with pytest.raises(wc.WeightclipError, match="exceeded 2 rows"):
        trainer.finish()


def test_padding_rows_change_nothing() -> None:
    trainer = HeadTrainer(features(), SETTINGS["factors"], 1.0, 0)
    rows = torch.arange(30)
    short, long = (trainer.contribution(r).sums for r in (rows, torch.cat([rows, torch.full((34,), 60)])))
    for a, b in zip(short, long, strict=True):
        assert all(torch.allclose(x, y, rtol=1e-6, atol=1e-9) for x, y in zip(a, b, strict=True))


def test_training_learns_and_seeds_matter() -> None:
    data = features(records=300)
    s = HeadSettings(hidden=16, batch=150, steps=150, learning_rate=0.05, cotangent_radius=1.0, layer_radius=100.0)
    first, second = (HeadTrainer(data, s, 0.0, seed).fit() for seed in (0, 1))
    assert first.accuracy(data) > 40 and not torch.equal(first.flat, second.flat)
    assert torch.equal(first.flat, HeadTrainer(data, s, 0.0, 0).fit().flat)
    assert first.accuracy(data.subset(torch.arange(50))) > 30
    assert _on(first, data).accuracy(data) == first.accuracy(data)


@pytest.mark.parametrize("name", ["factors", "flat", "weights"])
def test_falsifier_and_one_step_pass_on_the_engine(name: str) -> None:
    result = audit_head(SETTINGS[name], width=8, hidden=4)
    assert 0.3 < result["falsifier"] <= 1 + 1e-6 and 0.3 < result["one_step"] <= 1 + 1e-6


# -- the search ----------------------------------------------------------------------------------------------------


def test_proposals_depend_on_the_seed_alone_and_cover_every_method() -> None:
    for method in METHODS:
        for hidden in (0, 8):
            drawn = proposals(method, hidden, 1.0 if method != "non-private" else None, 5)
            assert drawn == proposals(method, hidden, 1.0 if method != "non-private" else None, 5)
            assert len({s.learning_rate for s in drawn}) == 5
            assert [HeadSettings.from_dict(s.to_dict()) for s in drawn] == drawn
            assert all(s.sphere == (method == "fix-lip") for s in drawn if hidden)
    assert all(len(set(s.joint_cap or ())) == 1 for s in proposals("dp-sgd", 8, 3.0, 5))


def test_settings_refuse_what_cannot_be() -> None:
    with pytest.raises(wc.WeightclipError, match="as many caps"):
        HeadSettings(hidden=8, joint_cap=(1.0,))
    with pytest.raises(wc.WeightclipError, match="weight_norm"):
        HeadSettings(sphere=True)
    with pytest.raises(wc.WeightclipError, match="allocation"):
        HeadSettings(allocation="none")
