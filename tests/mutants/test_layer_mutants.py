"""Mistakes in rows, copies, tied weights, recurrent layers and attention, made on purpose: the oracle must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.factors import test_attention, test_recurrent, zoo
from tests.mutants.kit import Mutants
from tests.oracle import Run, check, check_each, hostile, moves
from torch import nn

from weightclip.factors import _attention, _collector, _copies, _joint, _passes, _recurrent, _swap
from weightclip.factors._passes import RECORDS

Patch = pytest.MonkeyPatch
MUTANTS = Mutants()
mutant = MUTANTS.noticed_by


def exact(name: str) -> Callable[[], object]:
    return lambda: check(*zoo.made(name))


def limited(name: str) -> Callable[[], object]:
    def run() -> None:
        model, batch = zoo.made(name)
        assert moves(Run(model, batch, 0.3), hostile(batch)) <= 0.3 * (1 + 1e-4)

    return run


def recurrent(name: str) -> Callable[[], object]:
    return lambda: test_recurrent.test_gradients_are_exact(name)


@mutant(limited("folded positions"))
def every_row_of_a_record_has_the_limit_for_itself(patch: Patch) -> None:
    """Norms of rows, not of records: m rows move the sum by up to m limits."""
    real = _collector.Use.grouped

    def largest(self):
        x, d, conf = real(self)
        return (x[:, 0], d[:, 0], conf) if self.m > 1 else (x, d, conf)

    patch.setattr(_collector.Use, "grouped", largest)


@mutant(exact("folded positions"))
def scales_are_laid_on_rows_in_the_wrong_order(patch: Patch) -> None:
    def scaled(self, scale, wide=False):
        return self.part._wc_form.sums(self.part, self.x, self.d, scale.repeat(self.m), self.conf)

    patch.setattr(_collector.Use, "scaled", scaled)


@mutant(exact("records on dimension 1"))
def the_first_dimension_is_always_the_records(patch: Patch) -> None:
    patch.setattr(_passes, "layout_between", lambda one, other, sizes: RECORDS)


@mutant(limited("tied"))
def tied_layers_have_a_limit_each(patch: Patch) -> None:
    """The embedding's use is forgotten in the norm of the table's gradient."""
    real = _joint._rank_one
    patch.setattr(_joint, "_rank_one", lambda uses: real(uses[:1]))


@mutant(limited("tied"))
def the_embedding_is_left_out_of_the_tied_norm(patch: Patch) -> None:
    real = _joint.embedding_norm
    patch.setattr(_joint, "embedding_norm", lambda ids, rows, skip, dtype: 0 * real(ids, rows, skip, dtype))


@mutant(exact("tokens"))
def a_copy_gets_the_gradient_of_another_record(patch: Patch) -> None:
    real = _copies.collect
    patch.setattr(_copies, "collect", lambda key, token, x, d, conf=(): real(key, token, x, d.roll(1, 0), conf))


@mutant(exact("relative positions"))
def inputs_without_records_are_not_copied(patch: Patch) -> None:
    patch.setattr(_passes.Passes, "is_copy", lambda self, place, dims: False)


@mutant(limited("loop"))
def only_the_first_use_counts(patch: Patch) -> None:
    real = _collector.norm_over
    patch.setattr(_collector, "norm_over", lambda uses, way: real(uses[:1], way))


@mutant(recurrent("LSTM deep"))
def hidden_states_of_the_backward_direction_in_forward_order(patch: Patch) -> None:
    real = _recurrent._Tapped.close
    patch.setattr(_recurrent._Tapped, "close", lambda self, backwards: real(self, False))


@mutant(recurrent("GRU plain"))
def the_reset_gate_is_left_out_of_the_candidate(patch: Patch) -> None:
    def step(gates, hidden, state):
        (_, z, n), (_, hz, hn) = gates.chunk(3, 1), hidden.chunk(3, 1)
        z, n = torch.sigmoid(z + hz), torch.tanh(n + hn)
        return (n + z * (state[0] - n),)

    patch.setattr(_recurrent, "_gru", step)


@mutant(lambda: test_attention.test_gradients_are_exact("cross"))
def one_block_of_the_in_projection_for_all(patch: Patch) -> None:
    real = _attention.part_of

    def first(layer, kind, name, **more):
        more = {"rows": (0, layer.embed_dim)} if "rows" in more else more
        return real(layer, kind, name, **more)

    patch.setattr(_attention, "part_of", first)


@mutant(lambda: check_each(*zoo.made("own layers")))
def parts_of_a_layer_have_a_cap_each(patch: Patch) -> None:
    real = _collector.norm_over
    patch.setattr(_collector, "norm_over", lambda uses, way: torch.stack([real([u], way) for u in uses]).amax(0))


@mutant(limited("windows"))
def uses_of_one_kernel_are_taken_for_orthogonal(patch: Patch) -> None:
    real = _collector.Use.key
    seen: dict[int, int] = {}
    patch.setattr(_collector.Use, "key", lambda self: (*real(self), seen.setdefault(id(self), len(seen))))


@mutant(lambda: check(nn.Sequential(zoo.Doubled(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3)))
def a_forward_of_its_own_is_replaced(patch: Patch) -> None:
    patch.setattr(_swap, "known_form", lambda native: next(k for k in native.__mro__ if k in _swap.FORMS))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name: str, monkeypatch: Patch) -> None:
    mutate, notice = MUTANTS[name]
    _swap._private_class.cache_clear()
    notice()  # without it nothing is noticed
    mutate(monkeypatch)
    try:
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            notice()
    finally:
        _swap._private_class.cache_clear()
