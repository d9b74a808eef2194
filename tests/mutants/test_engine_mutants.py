"""Mistakes an engine can make, each as a patch: a check that passes on the real engine fails on the mutant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.mutants import engine_checks as checks
from tests.mutants.engine_checks import CHECKS
from tests.mutants.kit import Mutants
from torch import Tensor

import weightclip as wc
from weightclip.engine import _checkpoint
from weightclip.engine._entrance import InputProjection, Watch
from weightclip.engine._sensitivity import Sensitivities
from weightclip.engine._step import Training
from weightclip.noise._release import Release
from weightclip.noise._streams import Streams
from weightclip.sampling._loader import PoissonLoader

# resuming without a ledger says what it cannot know
pytestmark = pytest.mark.filterwarnings("ignore::weightclip.errors.UncountedReleases")


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_engine_passes(check: Callable[[], None]) -> None:
    check()


# -- mutants -----------------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
MUTANTS = Mutants()
mutant = MUTANTS.noticed_by


@mutant(checks.all_layers_together_are_one_mechanism)
def every_layer_as_if_alone(patch: Patch) -> None:
    patch.setattr(Release, "scales", lambda self, sensitivities: self.sigma * sensitivities)


@mutant(checks.all_layers_together_are_one_mechanism)
def noise_on_the_mean_instead_of_the_sum(patch: Patch) -> None:
    draw = Release._draw

    def thinner(self, noise, *args):
        draw(self, noise, *args)
        noise.div_(self.batch)

    patch.setattr(Release, "_draw", thinner)


@mutant(checks.the_sum_is_the_sum_over_the_public_batch_size)
def divided_by_the_realised_batch_size(patch: Patch) -> None:
    before = Training.before_step

    def step(self, *args):
        self.release.batch = self.info.rows
        before(self, *args)

    patch.setattr(Training, "before_step", step)


@mutant(checks.the_sum_is_the_sum_over_the_public_batch_size)
def averaged_over_the_records(patch: Patch) -> None:
    collect = Training.collect

    def averaged(self, passage, *to) -> None:
        passage.given = {end: g / len(g) for end, g in passage.given.items()}
        collect(self, passage, *to)

    patch.setattr(Training, "collect", averaged)


@mutant(checks.empty_draws_are_steps_of_pure_noise)
def empty_draws_are_drawn_again(patch: Patch) -> None:
    draw = PoissonLoader.indices

    def until_full(self, number: int):
        tries = (draw(self, number + 10**6 * k) for k in range(10**4))
        return next(found for found in tries if found.size)

    patch.setattr(PoissonLoader, "indices", until_full)


@mutant(checks.empty_draws_are_steps_of_pure_noise)
def padding_counts_as_a_record(patch: Patch) -> None:
    begin = Training.admit
    patch.setattr(Training, "admit", lambda self, logits: (begin(self, logits)[0], None))


@mutant(checks.one_record_stays_within_the_sensitivity)
def radius_from_the_largest_record_of_the_batch(patch: Patch) -> None:
    def project(self, x: Tensor) -> Tensor:
        return x / x.flatten(1).norm(dim=1).max() * min(self.radius, 1e3)

    patch.setattr(InputProjection, "_project", project)


@mutant(checks.pieces_release_once)
def noise_for_every_physical_batch(patch: Patch) -> None:
    before = Training.before_step

    def step(self, *args):
        info = self.info
        object.__setattr__(info, "last", True)
        before(self, *args)

    patch.setattr(Training, "before_step", step)


@mutant(checks.a_draw_is_released_once)
def one_draw_serves_for_several_steps(patch: Patch) -> None:
    spend = Training.spend

    def kept(self, release) -> None:
        info = self.info
        spend(self, release)
        self.info = info

    patch.setattr(Training, "spend", kept)


@mutant(checks.every_move_of_the_weights_is_charged)
def one_step_too_few(patch: Patch) -> None:
    before = Training.before_step

    def step(self, *args):
        before(self, *args)
        if self.engine.steps == 1 and not getattr(self, "_free", False):
            self.engine.steps, self._free = 0, True

    patch.setattr(Training, "before_step", step)


@mutant(checks.steps_have_independent_noise)
def the_same_noise_again(patch: Patch) -> None:
    real = Streams.for_release
    patch.setattr(Streams, "for_release", lambda self, charge, content: real(self, 0, content))
    noise = Release.noise
    patch.setattr(Release, "noise", lambda self, sensitivities, streams, step, *rest: noise(
        self, sensitivities, streams, 0, *rest
    ))  # fmt: skip


@mutant(checks.raw_gradients_are_never_seen)
def raw_gradients_left_in_grad(patch: Patch) -> None:
    real = Training.collect

    def collect(self, *args) -> None:
        real(self, *args)
        for parameter, total in zip(self.release.parameters, self.release.sums, strict=True):
            parameter.grad = total

    patch.setattr(Training, "collect", collect)


@mutant(checks.other_terms_leave_no_gradient)
def other_terms_left_in_grad(patch: Patch) -> None:
    patch.setattr(Training, "refuse_term", lambda self, parameter: None)


@mutant(checks.raw_gradients_are_never_seen)
def released_gradients_share_memory_with_later_ones(patch: Patch) -> None:
    real = Release.release

    def shared(self, *args) -> None:
        real(self, *args)
        views = self.__dict__.setdefault("views_of_the_first", [block.parameter.grad for block in self.blocks])
        for view, block in zip(views, self.blocks, strict=True):
            view.copy_(block.parameter.grad)
            block.parameter.grad = view

    patch.setattr(Release, "release", shared)


@mutant(checks.clipped_weights_are_clipped_after_the_step)
def clipped_before_the_step(patch: Patch) -> None:
    before = Training.before_step

    def step(self, *args):
        before(self, *args)
        self.clip()

    patch.setattr(Training, "before_step", step)
    patch.setattr(Training, "after_step", lambda self, *_: None)


@mutant(checks.large_sums_keep_single_records)
def sums_in_half_precision(patch: Patch) -> None:
    add = Release.add
    patch.setattr(Release, "add", lambda self, i, g: add(self, i, g.bfloat16().float()))


@mutant(checks.noise_is_not_rounded_to_half_precision)
def noise_in_half_precision(patch: Patch) -> None:
    real = Release.release

    def rounded(self, *args) -> None:
        real(self, *args)
        for block in self.blocks:
            block.parameter.grad = block.parameter.grad.bfloat16().float()

    patch.setattr(Release, "release", rounded)


@mutant(checks.a_resumed_run_remembers_its_steps)
def resumed_with_a_fresh_accountant(patch: Patch) -> None:
    load = _checkpoint.load

    def forget(engine, path, *, exact):
        before = engine.steps
        load(engine, path, exact=exact)
        engine.steps = before

    patch.setattr(_checkpoint, "load", forget)


@mutant(checks.a_rewound_run_never_repeats_noise)
def rewound_to_the_same_streams(patch: Patch) -> None:
    load = _checkpoint.load

    def back(engine, path, *, exact):
        streams = engine.streams
        load(engine, path, exact=exact)
        engine.streams, engine.steps = streams, 0

    patch.setattr(_checkpoint, "load", back)


@mutant(checks.bounds_follow_the_weights)
def bounds_of_the_first_weights(patch: Patch) -> None:
    evaluate = Sensitivities.evaluate

    def stale(self):
        if getattr(self, "_first", None) is None:
            self._first = evaluate(self)
        return self._first

    patch.setattr(Sensitivities, "evaluate", stale)


@mutant(checks.sequences_are_bounded_as_the_loss_sees_them)
def loss_bound_of_the_models_own_output(patch: Patch) -> None:
    certify = Sensitivities.update

    def wrong(self, autocast, modes, shape):
        certify(self, autocast, modes, self.plan.graph.nodes[self.plan.graph.output].op.out_shape)

    patch.setattr(Sensitivities, "update", wrong)


@mutant(checks.dropout_is_bounded_in_training_mode)
def certified_in_the_first_mode_only(patch: Patch) -> None:
    patch.setattr(Watch, "modes", lambda self: (False,) * len(self._modules))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, wc.ContractError)):  # seen from outside, or refused by the engine itself
        check()
