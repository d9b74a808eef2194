"""One run of the figure: every method trains and is charged what it releases, across deadlines and kills."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.tests.figure.figure_kit import pictures

import weightclip as wc
from weightclip.accounting import Mechanism, epsilon, read
from weightclip.bounds import Rescale, Sphere
from weightclip_studies.figure import METHODS, Recipe, _opacus, _train, train
from weightclip_studies.figure._audit import audit_recipe
from weightclip_studies.figure._opacus import opacus_step
from weightclip_studies.figure._recipe import BY_OPACUS, bounds_for, build
from weightclip_studies.images import _nets

# torch.func on the falsifier's unfolds
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
ENGINE = [m for m in METHODS if m not in (*BY_OPACUS, "plain")]
JOINT = Recipe("convnet", "joint", batch=40, steps=6)


@pytest.fixture(autouse=True)
def few_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _nets.dead_leaves
    monkeypatch.setattr(_nets, "dead_leaves", lambda n, *a, **k: whole(min(n, 12), *a, **k))
    _nets._leaves.cache_clear()


def spent(steps: int, sigma: float = 2.0, q: float = 0.5) -> float:
    return epsilon([Mechanism("gaussian", sigma, q, steps)], 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_says_what_it_spent(method: str, tmp_path: Path) -> None:
    data = pictures()
    recipe = Recipe("convnet", method, batch=40, steps=2, average=0.5, group_norm=True, standardise=True, views=1)
    done = train(data, recipe, 0.0 if method == "plain" else 2.0, 0, tmp_path)
    assert done is not None and done.releases == 2
    before = build(recipe, 1, 8, 0).state_dict()
    after = done.model.state_dict()
    assert all(torch.isfinite(v).all() and not torch.equal(v, before[k]) for k, v in after.items())
    assert type(done.model.get_submodule("features.0")) is wc.nn.StandardizedConv2d and not done.model.training
    if method == "plain":
        assert done.epsilon == float("inf")
        return
    assert done.epsilon == pytest.approx(spent(2), rel=1e-6)
    book = read(tmp_path / "ledger")  # of Opacus too
    assert book.charges == 2 and epsilon(book.mechanisms(), 1e-5) == pytest.approx(done.epsilon, rel=1e-6)


@pytest.mark.parametrize("change", [{"views": 4}, {"average": 0.0}, {"adam": False, "decay": False, "clip": 0.5}])
def test_recipes_run(change: dict[str, Any], tmp_path: Path) -> None:
    done = train(pictures(), replace(JOINT, steps=2, **change), 2.0, 0, tmp_path)
    assert done is not None and done.epsilon == pytest.approx(spent(2), rel=1e-6)


def test_draws_larger_than_a_pass_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_train, "ROWS", 60)
    taken: list[int] = []
    real = _train._Engine.inputs
    monkeypatch.setattr(_train._Engine, "inputs", lambda self, x: (taken.append(len(x)), real(self, x))[1])
    done = train(pictures(), replace(JOINT, steps=2, views=2), 2.0, 0, tmp_path)
    assert done is not None and done.releases == 2
    assert len(taken) > 2 and len(taken) % 2 == 0 and 2 * max(taken) <= 60  # of every draw a public number


def test_the_learning_rate_is_in_units_of_the_threshold() -> None:
    sgd = replace(JOINT, adam=False, decay=False, learning_rate=4.0, clip=0.5)
    assert sgd.rate(0) == sgd.rate(5) == 8.0 and replace(sgd, adam=True).rate(3) == 4.0
    assert replace(JOINT, learning_rate=1.0, steps=4).rate(1) == 0.75
    with pytest.raises(wc.WeightclipError, match="not for Opacus"):
        Recipe("convnet", "opacus", views=4)
    with pytest.raises(wc.WeightclipError, match=r"Recipe\.method"):
        Recipe("convnet", "magic")


# -- what bounds each method ----------------------------------------------------------------------------------------


def kind_of(bounds: wc.Bounds) -> str:
    """What of a record is limited, read from the bounds alone."""
    if bounds.weight_norm is not None:
        assert bounds.input_radius is not None
        assert all(getattr(bounds, k) is None for k in ("layer_radius", "cotangent_radius", "layer_cap", "joint_cap"))
        return {Sphere: "fix", Rescale: "weights"}[type(bounds.clip)]
    if bounds.joint_cap is not None:
        return "joint"
    return "caps" if bounds.layer_cap is not None else "factors"


@pytest.mark.parametrize("method", ENGINE)
def test_each_method_is_bounded_as_it_is_called(method: str) -> None:
    recipe = Recipe("convnet", method, group_norm=True)
    model = build(recipe, 1, 8, 0)
    bounds = bounds_for(recipe, model, pictures().synthetic())
    assert kind_of(bounds) == method
    assert bounds.caps == wc.CapNorm.CHEAPEST and bounds.adaptive is None  # exact norms; steps can be recorded


def test_thresholds_do_not_look_at_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[wc.Bounds] = []
    real = _train.bounds_for
    monkeypatch.setattr(_train, "bounds_for", lambda *a: (seen.append(real(*a)), seen[-1])[1])
    data = pictures()
    other = _nets.Pictures(255 - data.x, (data.y + 3) % 10, False)
    for i, records in enumerate((data, other)):
        train(records, replace(JOINT, method="caps", steps=1), 2.0, 0, tmp_path / str(i))
    assert seen[0] == seen[1]


@pytest.mark.skipif(os.environ.get("WEIGHTCLIP_FULL") != "1", reason="the driver's test audits one method")
@pytest.mark.parametrize("method", ENGINE)
def test_recipes_pass_the_audit(method: str) -> None:
    recipe = Recipe("convnet", method, group_norm=True, standardise=method == "joint")
    found = audit_recipe(recipe, restarts=2, steps=4)
    assert found["falsifier"] <= 1 + 1e-6 and found["one_step"] <= 1 + 1e-6
    assert found["falsifier"] > (0.5 if method in ("joint", "caps") else 0.0)


def test_weights_in_channels_last_can_be_stored(tmp_path: Path) -> None:
    """As the fast recipes have them on CUDA; safetensors takes dense rows alone."""

    class Run:
        done, model = 1, build(replace(JOINT, network="wrn-16-4"), 3, 8, 0).to(memory_format=torch.channels_last)

        def save(self, place: Path) -> None:
            pass

    run: Any = Run()
    average = wc.nn.ParameterAverage(run.model, 0.9)
    average.update()
    assert not all(v.is_contiguous() for v in average.state_dict()["average"].values())
    _train._save(run, average, tmp_path, 1.0, 1)
    stored = _train.load_file(str(tmp_path / "step-1" / "average.safetensors"))
    for name, value in average.state_dict()["average"].items():
        torch.testing.assert_close(stored[name], value, rtol=0.0, atol=0.0)


# -- deadlines and kills --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["joint", "opacus-adaptive", "plain"])
def test_a_run_goes_on_after_its_deadline(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_train, "_CLOCK", 1)
    recipe, sigma = replace(JOINT, method=method, steps=3), 0.0 if method == "plain" else 2.0
    states: list[dict[str, torch.Tensor]] = []
    for left in (2, 1):
        assert train(pictures(), recipe, sigma, 0, tmp_path, deadline=time.monotonic() - 1) is None
        place = tmp_path / f"step-{3 - left}"
        assert [p for p in tmp_path.glob("step-*")] == [place]
        states.append(_train.load_file(str(place / "average.safetensors")))
    done = train(pictures(), recipe, sigma, 0, tmp_path)
    assert done is not None and done.releases == 3 and done.seconds > 0
    assert any(not torch.equal(states[0][k], states[1][k]) for k in states[0])
    if sigma:
        assert done.epsilon == pytest.approx(spent(3), rel=1e-6)
    _train.discard(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == (["ledger"] if sigma else [])


@pytest.mark.parametrize("method", ["joint", "opacus"])
def test_a_killed_run_is_charged_for_what_it_released_and_spends_no_more(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    monkeypatch.setattr(_train, "_CLOCK", 1)
    recipe, updates = replace(JOINT, method=method), []
    kind = _train._Engine if method == "joint" else _train._Other
    real, close = kind.step, kind.close

    def step(self: Any) -> None:
        if self.done == 4 and not updates:
            raise Killed
        real(self)

    def killed(self: Any) -> float:  # what the system does for a process that is killed: its files are closed
        ledger = self.engine.ledger if method == "joint" else self.ledger
        fd, ledger._fd = ledger._fd, -1
        os.close(fd)
        return 0.0

    monkeypatch.setattr(kind, "step", step)
    monkeypatch.setattr(kind, "close", killed)
    saves: list[int] = []
    save = _train._save

    def at_two(run: Any, *rest: Any) -> None:
        if run.done == 2:
            saves.append(run.done)
            save(run, *rest)

    monkeypatch.setattr(_train, "_save", at_two)
    with pytest.raises(Killed):
        train(pictures(), recipe, 2.0, 0, tmp_path, every=0.0)
    assert saves == [2] and read(tmp_path / "ledger").charges == 4  # two releases after the checkpoint
    monkeypatch.setattr(kind, "close", close)

    def counted(self: Any) -> None:
        updates.append(self.done)
        real(self)

    updates.append(-1)
    monkeypatch.setattr(kind, "step", counted)
    done = train(pictures(), recipe, 2.0, 0, tmp_path)
    assert updates[1:] == [4, 5]  # the two that were lost are not made again
    assert done is not None and done.releases == 6 == read(tmp_path / "ledger").charges and done.updates == 4
    assert done.epsilon == pytest.approx(spent(6), rel=1e-6)


def test_a_finished_run_is_found_again_as_it_ended(tmp_path: Path) -> None:
    first = train(pictures(), JOINT, 2.0, 0, tmp_path)
    again = train(pictures(), JOINT, 2.0, 0, tmp_path)  # its row was not written: killed in between
    assert first is not None and again is not None and again.updates == again.releases == JOINT.steps
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_may_end_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_train, "_CLOCK", 1)
    told: list[str] = []
    done = train(pictures(), JOINT, 2.0, 0, tmp_path, deadline=time.monotonic() - 1, finish=True, tell=told.append)
    assert done is not None and done.releases == done.updates == 1 and told[0].startswith("1 of 6 steps")
    assert done.epsilon == pytest.approx(spent(1), rel=1e-6)


# -- Opacus ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_adaptive_thresholds_follow_the_public_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pictures()

    def threshold(clip: float) -> float:
        recipe = Recipe("convnet", "opacus-adaptive", batch=40, clip=clip)
        model = build(recipe, 1, 8, 0)
        step, private = opacus_step(model, torch.optim.SGD(model.parameters(), lr=0.0), recipe, 40, 0.0)
        private.unclipped_num_std = 0.0
        step(data.inputs(data.x[:20]), data.y[:20])  # half of an expected batch
        with pytest.raises(wc.WeightclipError, match="empty draw"):
            step(data.inputs(data.x[:0]), data.y[:0])
        return float(private.max_grad_norm)

    assert threshold(1e3) == pytest.approx(1e3 * math.exp(-0.2 * (20 / 40 - 0.5)))  # none of them clipped
    assert threshold(1e-3) == pytest.approx(1e-3 * math.exp(-0.2 * (0 - 0.5)))  # all of them
    some = next(c for c in torch.logspace(1, -1, 40).tolist() if 0.005 < math.log(threshold(c) / c) < 0.095)
    whole = threshold(some)
    parameters = sum(p.numel() for p in build(JOINT, 1, 8, 0).parameters())
    monkeypatch.setattr("weightclip_studies.figure._opacus._MOST", 7 * parameters)
    assert threshold(some) == pytest.approx(whole, rel=1e-9)  # pieces of seven records count together


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_both_ways_of_opacus_make_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    data, recipe, moved = pictures(), Recipe("convnet", "opacus", batch=40, clip=0.1), []
    assert _opacus.ghost_is_faster(recipe) and not _opacus.ghost_is_faster(replace(recipe, standardise=True))
    for ghost, rows in ((True, 100), (True, 7), (False, 100)):
        monkeypatch.setattr(_opacus, "ghost_is_faster", lambda recipe, ghost=ghost: ghost)
        model = build(recipe, 1, 8, 0)
        step, _ = opacus_step(model, torch.optim.SGD(model.parameters(), lr=1.0), recipe, 40, 0.0, rows)
        for _ in range(2):
            step(data.inputs(data.x), data.y)
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in moved[1:]:
        assert torch.allclose(moved[0], other, atol=1e-5)
    assert not torch.allclose(moved[0], torch.cat([p.detach().flatten() for p in build(recipe, 1, 8, 0).parameters()]))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_an_adaptive_threshold_costs_what_is_accounted() -> None:
    """One record moves the count by 1 and the gradient by the threshold: together they have the multiplier sigma."""
    for sigma, batch in ((1.0, 40), (4.0, 40), (2.0, 4096)):
        recipe = Recipe("convnet", "opacus-adaptive", batch=batch, clip=1.0)
        model = build(recipe, 1, 8, 0)
        _, private = opacus_step(model, torch.optim.SGD(model.parameters(), lr=0.0), recipe, batch, sigma)
        count, said = private.unclipped_num_std, private.noise_multiplier
        gradients = (said**-2 - (2 * count) ** -2) ** -0.5  # as Opacus draws them
        assert (gradients**-2 + count**-2) ** -0.5 == pytest.approx(sigma, rel=1e-9)


def test_noise_of_opacus_comes_from_no_public_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    forked: list[object] = []
    real = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda *a, **k: forked.append((a, k)) or real(*a, **k))
    recipe = Recipe("convnet", "opacus", batch=40, clip=1.0)
    found = []
    for _ in range(2):
        model = build(recipe, 1, 8, 0)
        found.append(opacus_step(model, torch.optim.SGD(model.parameters(), lr=0.0), recipe, 40, 1.0)[1].generator)
    assert forked == [((), {})] * 2  # of GPUs too
    assert found[0].initial_seed() != found[1].initial_seed()
