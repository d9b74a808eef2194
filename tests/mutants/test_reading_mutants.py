"""What the fourth and the sixth reading found, put back on purpose: each mistake, and the test that must notice."""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine import test_fourth_reading as engine
from tests.engine import test_sixth_reading as engine_again
from tests.mutants.kit import Mutants
from tests.noise import test_streams as streams
from tests.tabular import test_fourth_reading as tables
from tests.tabular import test_sixth_reading as tables_again
from torch import nn

import weightclip as wc
from weightclip.engine import _engine, _entrance, _example, _gate, _independence, _install, _step, _validate
from weightclip.errors import WeightclipError
from weightclip.noise import Streams
from weightclip.tabular import LipDPClassifier, LipDPRegressor, _columns, _fit, _inputs, _resume, _training
from weightclip.tabular._private import Door

MUTANTS = Mutants()
noticed_by = MUTANTS.noticed_by
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def in_a_folder(check: Callable[[Path], None]) -> Callable[[], None]:
    """The check, in a folder of its own."""

    @functools.wraps(check)
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))

    return run


@noticed_by(engine.check_copies)
def copies_are_taken_as_they_are(patch: Patch) -> None:
    patch.setattr(_gate, "version_of", lambda tensor: 0)


@noticed_by(engine.check_state)
def only_writes_in_place_are_seen(patch: Patch) -> None:
    def after(self, module, args, output) -> None:
        for tensor, version in self._before or ():
            if tensor._version != version and not isinstance(tensor, wc.engine._entrance.nn.Parameter):
                raise wc.ContractError("forward writes it")

    patch.setattr(_entrance.BufferGuard, "after", after)


@noticed_by(engine.check_state)
def random_records_stay_in_buffers(patch: Patch) -> None:
    import contextlib

    for module in (_install, _engine):
        patch.setattr(module, "buffers_kept", lambda model: contextlib.nullcontext())


@noticed_by(engine.check_caches)
def buffers_are_taken_away_and_what_knows_of_them_is_not(patch: Patch) -> None:
    import contextlib

    @contextlib.contextmanager
    def kept(model):
        tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        yield
        for table, buffers in tables:
            table.clear()
            table.update(buffers)

    for module in (_install, _engine):
        patch.setattr(module, "buffers_kept", kept)


@noticed_by(engine.check_sometimes)
def one_outcome_of_random_numbers(patch: Patch) -> None:
    patch.setattr(_independence, "_MASKS", 0)


@noticed_by(engine.check_bytes)
def bytes_of_zero_and_one(patch: Patch) -> None:
    patch.setattr(_example.Call, "with_bytes", lambda self: None)


@noticed_by(engine.check_ahead)
def batches_may_be_fetched_ahead(patch: Patch) -> None:
    patch.setattr(_entrance.Entrance, "refuse_ahead", lambda self: None)


@noticed_by(engine.check_price)
def a_price_that_can_be_set(patch: Patch) -> None:
    patch.setattr(wc.PrivacyEngine, "noise_multiplier", 1.0)


@noticed_by(engine.check_fork)
def forks_count_for_themselves(patch: Patch) -> None:
    class Here:
        getpid = staticmethod(lambda: engine_process[0])

    engine_process = [0]
    patch.setattr(_step, "os", Here)
    patch.setattr(_engine, "os", Here)


@noticed_by(in_a_folder(engine.check_other_runs))
def runs_without_names(patch: Patch) -> None:
    patch.setattr(_engine.secrets, "token_hex", lambda n: "0" * 2 * n)


@noticed_by(engine.check_interrupted)
def an_interrupted_sum_goes_on(patch: Patch) -> None:
    real = _step.Training.drop
    patch.setattr(_step.Training, "drop", lambda self: None if self._broken is not None else real(self))
    patch.setattr(_step.Training, "admit_batch", lambda self: self.info)


@noticed_by(engine.check_two_models)
def layers_of_two_engines(patch: Patch) -> None:
    patch.setattr(_validate, "is_held", lambda module: False)


@noticed_by(in_a_folder(tables.check_shared))
def foreign_charges_count_as_own_steps(patch: Patch) -> None:
    real = _training._alone
    patch.setattr(_training, "_alone", lambda *args: real(*args) or args[2] is not None)


@noticed_by(in_a_folder(tables.check_swapped))
def any_ledger_will_do(patch: Patch) -> None:
    patch.setattr(_resume.Checkpoint, "alone", lambda self, ledger: True)


@noticed_by(in_a_folder(tables.check_copied))
def a_look_for_every_copy(patch: Patch) -> None:
    patch.setattr(Door, "charge_next", lambda self, mechanism, charges, begin: self.charge(mechanism) is not None)
    patch.setattr(_training, "_alone", lambda *args: True)


@noticed_by(in_a_folder(tables.check_copied))
def a_look_that_is_not_charged(patch: Patch) -> None:
    patch.setattr(Door, "charge_next", lambda self, mechanism, charges, begin: True)


@noticed_by(tables.check_rounding)
def the_true_number_of_records_decides(patch: Patch) -> None:
    real = _fit._train

    def train(table, fitted, labels, classes, plan, n, look=None):
        with pytest.MonkeyPatch.context() as once:
            once.setattr(_fit, "_IN_MEMORY", _fit._IN_MEMORY * n // len(table))
            return real(table, fitted, labels, classes, plan, n, look)

    patch.setattr(_fit, "_train", train)


@noticed_by(tables.check_weights)
def weights_of_one_type(patch: Patch) -> None:
    real = _inputs.to_numbers
    patch.setattr(_inputs, "to_numbers", lambda values: real(np.asarray(values).ravel().tolist()))


@noticed_by(tables.check_labels)
def columns_made_numbers_at_once(patch: Patch) -> None:
    patch.setattr(_inputs, "_boxed", lambda y: y)


@noticed_by(tables.check_spelling)
def text_with_a_hash_of_its_own(patch: Patch) -> None:
    patch.setattr(_columns, "_spell", str)


@noticed_by(streams.test_pickled_parts_of_a_run_stay_parts)
def pickled_parts_become_the_run(patch: Patch) -> None:
    def state(self: Streams) -> dict:
        return {"seed": self._seed, "path": []}

    patch.setattr(Streams, "__reduce__", lambda self: (Streams.from_state, (state(self),)))


@noticed_by(engine_again.check_parameters)
def parameters_may_be_replaced(patch: Patch) -> None:
    def parts_alone(self: _entrance.Watch, model: nn.Module, real=_entrance.Watch.__init__) -> None:
        real(self, model)
        self._parts = [part for part in self._parts if part[1] is part[0]._modules]

    patch.setattr(_entrance.Watch, "__init__", parts_alone)


@noticed_by(engine_again.check_parameters)
def frozen_parameters_alone_are_guarded(patch: Patch) -> None:
    def frozen(self: _entrance.BufferGuard, *args, real=_entrance.BufferGuard.__init__) -> None:
        real(self, *args)
        self._parameters = [(name, p) for name, p in self._parameters if not p.requires_grad]

    patch.setattr(_entrance.BufferGuard, "__init__", frozen)


@noticed_by(engine_again.check_optimisers)
def optimisers_get_the_loss(patch: Patch) -> None:
    def evaluate(args, kwargs):
        with torch.enable_grad():
            value = args[1]()
        return (args[0], lambda: value), kwargs

    patch.setattr(_step, "evaluate_closure", evaluate)


@noticed_by(engine_again.check_ahead)
def strict_loops_alone_fetch_nothing_ahead(patch: Patch) -> None:
    def hand_out(self: _step.Training, info, real=_step.Training.hand_out) -> None:
        real(self, info)
        self.entrance.ahead = self.entrance.ahead and self.engine.loader.strict

    patch.setattr(_step.Training, "hand_out", hand_out)


@noticed_by(tables_again.check_failed_fits)
def failed_fits_leave_what_they_found(patch: Patch) -> None:
    for kind in (LipDPClassifier, LipDPRegressor):
        patch.setattr(kind, "fit", inspect.unwrap(kind.fit))


@noticed_by(tables_again.check_diverging_runs)
def diverging_runs_end_a_search(patch: Patch) -> None:
    patch.setattr(_training, "NotFinite", WeightclipError)


@noticed_by(tables_again.check_layers)
def rounding_tells_the_number_of_records(patch: Patch) -> None:
    patch.setattr(_training.Settings, "divisor", lambda self, n, declared: float(min(self.batch, n)))


@pytest.mark.parametrize("name", MUTANTS)
def test_each_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, KeyError, TypeError, AttributeError, wc.ContractError)):
        check()
