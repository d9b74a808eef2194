"""Mistakes in enforcing limits at the product, each as a patch that some hole of tests/holes.py must show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from tests.engine.test_holes import BOUNDS, REFUSED, Branch, Mean, Memory, Running
from tests.engine_kit import private, table
from tests.holes import HOLES, moved
from tests.mutants.kit import Mutants

import weightclip as wc
from weightclip.engine import _install as install
from weightclip.engine._entrance import BufferGuard, Entrance
from weightclip.engine._gate import _Wall
from weightclip.engine._step import Training
from weightclip.factors import Collector, Limits, _collector, _layers, _limits, _passes

pytestmark = pytest.mark.filterwarnings("ignore:.*attribute", "ignore:.*should not be instantiated")
Patch = pytest.MonkeyPatch


def limited(name: str, bounds: str = "certified") -> Callable[[], bool]:
    """Whether one record stays within the limit, or is refused."""

    def check() -> bool:
        with contextlib.suppress(wc.ContractError):
            return moved(*HOLES[name], BOUNDS[bounds]) <= 1 + 1e-4
        return True

    return check


def refused(name: str, bounds: str = "default") -> Callable[[], bool]:
    def check() -> bool:
        make, act, _ = REFUSED[name]
        run = private(make(), table(8), bounds=BOUNDS[bounds], sigma=1.0)
        try:
            act(run, *next(iter(run.loader)))
        except wc.ContractError:
            return True
        return False

    return check


def not_made_private(make: type, bounds: str = "default") -> Callable[[], bool]:
    def check() -> bool:
        try:
            private(make(), table(8), bounds=BOUNDS[bounds])
        except wc.WeightclipError:
            return True
        return False

    return check


def foreign_terms_are_refused() -> bool:
    for term in (
        lambda run, x: run.model(x).square().mean(),
        lambda run, x: sum(p.sum() for p in run.model.parameters()),
    ):
        run = private(HOLES["float"][0](), table(8), bounds=BOUNDS["default"])
        x, y = next(iter(run.loader))
        try:
            (run.criterion(run.model(x), y) + term(run, x)).backward()
        except wc.ContractError:
            continue
        return False
    return True


def a_negative_loss_is_refused() -> bool:
    run = private(HOLES["float"][0](), table(8), bounds=BOUNDS["default"])
    x, y = next(iter(run.loader))
    try:
        (-run.criterion(run.model(x), y)).backward()
    except wc.ContractError:
        return True
    return False


MUTANTS = Mutants()
mutant = MUTANTS.noticed_by


def _unlimited(patch: Patch) -> None:
    patch.setattr(Collector, "_scale", lambda self, *args: None)


for _name in HOLES:
    MUTANTS[f"no limit at the product: {_name}"] = (_unlimited, limited(_name))
for _name in ("another thread traces",):  # there the input is far too large, and limited all the same
    del MUTANTS[f"no limit at the product: {_name}"]
del MUTANTS["no limit at the product: hook on a parameter"]  # which no product passes


@mutant(limited("hook on a parameter"))
def products_pass_through_the_parameters(patch: Patch) -> None:
    def apply(function, layer, x, weight, bias, *conf):
        return _layers.EAGER[function].apply(x, weight, bias, None, 0, layer._wc_limits.clone(), *conf)

    def backward(self, outputs, gradients, parameters):
        found = torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
        for i, g in enumerate(found):
            if g is not None and self.probe is None:
                self.add(i, g)
        return []

    patch.setattr(_layers, "apply", apply)
    patch.setattr(Collector, "backward", backward)


@mutant(limited("float"))
def limits_larger_than_the_noise(patch: Patch) -> None:
    real = Limits.set
    patch.setattr(Limits, "set", lambda self, sensitivities, constant=False: real(self, 2 * sensitivities))


@mutant(limited("more uses than certified"))
def every_use_has_a_limit_of_its_own(patch: Patch) -> None:
    take = Collector.take

    def forget(self, entry, *args):
        entry.taken, entry.spent = 0, None
        take(self, entry, *args)

    patch.setattr(Collector, "take", forget)


@mutant(limited("more uses than certified", "joint cap by name"))
def uses_under_the_joint_cap_forgotten_in_its_norm(patch: Patch) -> None:
    norm = _collector.norm_over
    patch.setattr(_collector, "norm_over", lambda uses, way: norm(uses[:1], way))


@mutant(refused("positions folded into the batch"))
def rows_taken_for_records(patch: Patch) -> None:
    take = Collector.take

    def trusting(self, entry, x, d, borrowed=False, conf=()):
        if self.rows is not None:
            self.rows = x.shape[0]
        take(self, entry, x, d, borrowed, conf)

    patch.setattr(Collector, "take", trusting)
    patch.setattr(_collector.torch, "stack", lambda parts, *a: parts[0], raising=False)


@mutant(refused("tied weights, a view or a multiple"))
def parameters_may_reach_the_loss_beside_their_layers(patch: Patch) -> None:
    real = Collector.backward
    patch.setattr(Collector, "backward", lambda self, *args: real(self, *args)[:0])


@mutant(refused("gradient penalty"))
def second_derivatives_pass(patch: Patch) -> None:
    from weightclip.factors import _dense

    patch.setattr(_dense, "collect", lambda key, token, x, d: _passes._deliver(key, x, d, False, ())
                  if not torch.is_grad_enabled() else None)  # fmt: skip


@mutant(refused("functional_call with other weights"))
def any_tensor_may_sit_in_a_private_layer(patch: Patch) -> None:
    patch.setattr(_passes.Sink, "check", lambda self, weight: None)


@mutant(refused("integer records", "certified"))
def integers_pass_unprojected(patch: Patch) -> None:
    patch.setattr(Entrance, "_kinds", staticmethod(lambda found: {}))


def trains_while_another_thread_traces() -> bool:
    try:
        return moved(*HOLES["another thread traces"]) <= 1 + 1e-4
    except wc.ContractError:
        return False


@mutant(trains_while_another_thread_traces)
def tracing_is_seen_by_every_thread(patch: Patch) -> None:
    patch.setattr(_layers, "is_plain", lambda: _limits._MODE.plain_in is not None)


def _only_run(probe, call, size, rowwise=False, places=True):
    return probe(call.random(2, 1))


for _make in (Branch, Mean, Memory):
    MUTANTS[f"independence is not tested: {_make.__name__}"] = (
        lambda patch: patch.setattr(install, "check_independence", _only_run), not_made_private(_make)
    )  # fmt: skip


@mutant(not_made_private(Running))
def running_statistics_pass(patch: Patch) -> None:
    patch.setattr(install, "check_independence", _only_run)
    patch.setattr(BufferGuard, "after", lambda self, module, args, output: None)


@mutant(foreign_terms_are_refused)
def terms_on_the_output_are_dropped_in_silence(patch: Patch) -> None:
    patch.setattr(_Wall, "backward", staticmethod(lambda ctx, gradient: (None,) * 4))


@mutant(foreign_terms_are_refused)
def penalties_on_weights_are_dropped_in_silence(patch: Patch) -> None:
    patch.setattr(Training, "refuse_term", lambda self, parameter: setattr(parameter, "grad", None))


@mutant(a_negative_loss_is_refused)
def factors_of_the_loss_are_ignored(patch: Patch) -> None:
    patch.setattr(Training, "check_upstream", lambda self, upstream: None)


CHECKS = [foreign_terms_are_refused, a_negative_loss_is_refused, trains_while_another_thread_traces]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_engine_passes(check: Callable[[], bool]) -> None:
    assert check()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name: str, monkeypatch: Patch) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    try:
        fine = check()
    except (RuntimeError, TypeError, IndexError):  # a mutant may also break down altogether
        fine = False
    assert not fine
