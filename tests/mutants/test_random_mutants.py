"""Mistakes with draws, masks, seeds and places, each as a patch: the check that passes on the engine fails on it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.engine import test_noise_reuse as reuse
from tests.engine.test_public_pieces import a_scheduler_of_iterations_does_not_see_the_draw
from tests.engine.test_strict import a_records_place_does_not_depend_on_the_others
from tests.mutants.kit import Mutants
from tests.sampling.test_later_code import hooks_draw_in_secret, kept_tensors_draw_in_secret, modes_draw_in_secret
from tests.sampling.test_randomness import (
    augmentation_belongs_to_the_record,
    masks_do_not_come_from_the_users_seed,
)

import weightclip as wc
from weightclip.engine import _engine, _gate, _install, _step
from weightclip.engine._digest import tensors_digest
from weightclip.engine._entrance import Watch
from weightclip.engine._step import Training
from weightclip.noise._adaptive import Quantiles
from weightclip.noise._streams import Streams
from weightclip.sampling._draws import Cutter, Piece
from weightclip.sampling._loader import PoissonLoader
from weightclip.sampling._randomness import ForwardRandomness, Generators

Patch = pytest.MonkeyPatch
MUTANTS = Mutants()
mutant = MUTANTS.noticed_by


@mutant(a_scheduler_of_iterations_does_not_see_the_draw)
def as_many_pieces_as_the_draw_fills(patch: Patch) -> None:
    patch.setattr(Cutter, "pieces_of", lambda self, total: max(1, -(-total // (self.size or max(1, total)))))


@mutant(masks_do_not_come_from_the_users_seed)
def dropout_from_the_users_seed(patch: Patch) -> None:
    for name in ("enter", "leave"):
        patch.setattr(ForwardRandomness, name, lambda self: None)


@mutant(masks_do_not_come_from_the_users_seed)
def dropout_from_a_public_key(patch: Patch) -> None:
    seed = Generators.seed
    patch.setattr(Generators, "seed", lambda self, key: seed(self, b"public"))


@mutant(hooks_draw_in_secret)
def hooks_that_came_later_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(Watch, "same_code", lambda self: True)


@mutant(hooks_draw_in_secret)
def a_chain_of_torchs_layers_stays_one_with_a_hook_on_it(patch: Patch) -> None:
    patch.setattr(Training, "forget_other_code", lambda self: self.watch.changed() and (self.tested.clear() or True))


@mutant(modes_draw_in_secret)
def modes_that_draw_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(_gate, "modes_active", lambda: False)


@mutant(kept_tensors_draw_in_secret)
def hooks_on_kept_tensors_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: None)


@mutant(masks_do_not_come_from_the_users_seed)
def dropout_taken_for_a_layer_of_rows(patch: Patch) -> None:
    patch.setattr(_install, "acts_on_rows", lambda model: True)
    patch.setattr(_engine, "model_draws", lambda *_: False)


@mutant(augmentation_belongs_to_the_record)
def augmentation_from_the_users_seed(patch: Patch) -> None:
    patch.setattr(Generators, "seed", lambda self, key: None)
    patch.setattr("weightclip.sampling._keyed.given_back", _nothing)


class _nothing:
    def __init__(self, *_) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        pass


@mutant(reuse.one_seed_with_other_records_has_other_noise)
def noise_keyed_without_the_sum(patch: Patch) -> None:
    patch.setattr(Training, "content", lambda self: tensors_digest(self.release.parameters, b""))


@mutant(reuse.equal_sums_at_other_weights_have_other_noise)
def noise_keyed_without_the_weights(patch: Patch) -> None:
    patch.setattr(Training, "content", lambda self: tensors_digest(self.release.sums, b""))


@mutant(reuse.one_seed_with_another_rate_has_other_noise)
def noise_keyed_by_seed_and_step(patch: Patch) -> None:
    patch.setattr(Streams, "for_release", lambda self, charge, content: self)


@mutant(reuse.an_exact_resume_with_another_rate_has_other_noise)
def an_exact_resume_replays_the_noise(patch: Patch) -> None:
    patch.setattr(_step, "tensors_digest", lambda tensors, key: bytes(32))


@mutant(reuse.one_seed_with_another_sigma_has_other_noise)
def noise_keyed_without_the_settings(patch: Patch) -> None:
    patch.setattr(Streams, "settled", lambda self, settings: self)


@mutant(reuse.a_secure_run_that_is_set_back_has_other_noise)
def secure_noise_by_number_alone(patch: Patch) -> None:
    patch.setattr(Streams, "for_release", lambda self, charge, content: self)


@mutant(reuse.limits_that_adapt_have_noise_of_their_own)
def quantiles_keyed_by_seed_and_step(patch: Patch) -> None:
    release = Quantiles.release
    patch.setattr(Quantiles, "release", lambda self, streams, step: release(self, Streams.seeded(3), step))


@mutant(reuse.charged_draws_are_never_handed_out_again)
def a_loaded_state_replays_draws(patch: Patch) -> None:
    load = PoissonLoader.load_state_dict

    def replay(self, state) -> None:
        load(self, state)
        self._number, self.draws = None, state["draws"]

    patch.setattr(PoissonLoader, "load_state_dict", replay)


@mutant(a_records_place_does_not_depend_on_the_others)
def strict_without_shuffling(patch: Patch) -> None:
    def in_order(self, draw: int, drawn: np.ndarray, count: int, rng) -> Iterator[Piece]:
        for number in range(count):
            part = drawn[number * self.size : (number + 1) * self.size]
            yield Piece(draw, number, number == count - 1, part, np.arange(part.size))

    patch.setattr(Cutter, "_scattered", in_order)


@mutant(a_records_place_does_not_depend_on_the_others)
def strict_within_each_piece_only(patch: Patch) -> None:
    def in_order(self, draw: int, drawn: np.ndarray, count: int, rng) -> Iterator[Piece]:
        for number in range(count):
            part = drawn[number * self.size : (number + 1) * self.size]
            yield Piece(draw, number, number == count - 1, part, np.sort(rng.permutation(self.size)[: part.size]))

    patch.setattr(Cutter, "_scattered", in_order)


@pytest.mark.filterwarnings("ignore::weightclip.errors.UncountedReleases")
@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, wc.ContractError)):  # seen from outside, or refused by the engine itself
        check()
