"""One private step: admit -> limits -> collect -> charge -> release.

A draw of the loader goes through it piece by piece: the loss of a piece is *admitted*, *limits* are brought up to date,
its backward pass *collects* every record's limited products, and after the last piece the release is *charged* and then
made. An ordinary loop runs it by hooks (criterion, backward, optimiser); :class:`FusedStep` runs
the same sequence in one call, or as a CUDA graph. Charge and release follow each other in :meth:`Training.spend` alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weightclip.certificate import OpenPlan, Plan, WeightClipper
from weightclip.engine._digest import tensors_digest
from weightclip.engine._entrance import BufferGuard, Entrance, Watch
from weightclip.engine._example import Call
from weightclip.engine._gate import Argument, OutputGate, Passage, evaluate_closure, refuse_scaler, refuse_strangers
from weightclip.engine._sensitivity import Sensitivities
from weightclip.engine._together import agree_on_step, release_together
from weightclip.errors import BudgetSpent, ContractError
from weightclip.factors import Collector, Limits, Product
from weightclip.noise import Entrywise, Quantiles, Release, Streams
from weightclip.sampling import FORWARD, BatchInfo, ForwardRandomness

if TYPE_CHECKING:
    from weightclip.accounting import Ledger
    from weightclip.distributed import SharedLedger
    from weightclip.engine._engine import PrivacyEngine
    from weightclip.engine._install import Tested

_ONE_LOSS = threading.RLock()


class Spending:
    """The part of an engine that a step asks: what it has released, and whether it may release more."""

    steps: int
    budget: int | None
    _ledger: Ledger | SharedLedger | None
    _training: Training | None
    _process: int  # that counts: copies of it would count for themselves

    @property
    def training(self) -> Training:
        """The parts of the run, for those who check it (audits, reports): read them, change nothing."""
        if self._training is None:
            raise ContractError("this engine has no model yet: call make_private first.")
        return self._training

    def steps_left(self) -> int | None:
        """Releases that the budget still allows; None without one."""
        return None if self.budget is None else max(0, self.budget - self.steps)

    def refuse_overspending(self) -> None:
        """Raise where the budget allows no further release."""
        if self.steps_left() == 0:
            raise BudgetSpent("the privacy budget is spent: no further step may be released.")

    def charge(self) -> int:
        """Count one release, before it is made; its number.

        With a ledger the count is on the disk when this returns; its number is one no run on the ledger ever had.
        """
        if os.getpid() != self._process:
            raise ContractError(
                "this process is a fork of the one that made the model private: releases would be counted in neither. "
                "Call make_private in the process that trains."
            )
        step = self.steps if self._ledger is None else self._ledger.charge(self.steps_left())
        self.steps = step + 1
        return step


@dataclass(eq=False)
class Draw:
    """What was collected of one draw, from its first loss to its release."""

    number: int
    settings: tuple[Any, ...]  # what all its pieces have in common where bounds are certified
    pieces: set[int] = field(default_factory=set)  # those whose loss was taken
    ready: bool = False  # whether the last of them is in the sum


class Training:
    """The parts of a private run, to be read by audits, checkpoints and reports; and the one sequence of its steps.

    Attributes:
        engine: Whose run it is: it counts the charges.
        release: Sums and noise; ``sensitivity`` what the noise is scaled for; ``collector`` where products are limited.
        limits: The table of limits; ``products`` how each layer's products are formed, ``quantiles`` of adaptive ones.
        gate, entrance, randomness, watch: The doors of the model and what must not change behind them.
        test: Runs the test of independence for (signature, modes); ``tested`` what it has found.
        info: The batch that was handed out last; ``draw`` what is collected of its draw.

    Formal guarantees:
        The sum that is released holds, for each record of one draw, once, products that were limited to what its noise
        is scaled for (:class:`weightclip.factors.Collector`), and nothing else: a gradient that reaches a parameter by
        any other way raises. Every release is charged before it is made.
    """

    limits: Limits
    collector: Collector
    entrance: Entrance
    buffers: BufferGuard
    gate: OutputGate
    randomness: ForwardRandomness
    quantiles: Quantiles | None = None
    rowwise: bool = False  # whether the model was a chain of layers that act on each row alone

    def __init__(
        self, engine: PrivacyEngine, model: nn.Module, plan: Plan | OpenPlan, call: Call, release: Release,
        products: dict[str, Product], entrywise: Entrywise | None, draws: bool,
    ) -> None:  # fmt: skip
        self.engine, self.model, self.call, self.release, self.products = engine, model, call, release, products
        self.alone = engine.ranks.count == 1 and engine.shards is None  # nobody to agree with, nothing to exchange
        if not self.alone:
            release.share = lambda released: engine.ranks.spread([released])
        self.draws = draws  # whether the model draws random numbers
        self.sensitivity = Sensitivities(self, plan, release, entrywise)
        self.clip = WeightClipper(model, plan.bounds, list(plan.layers), self.sensitivity.gains)
        self.watch = Watch(model)
        self.held = [*model.parameters(), *model.buffers()]
        self.strays: set[int] = set()  # parameters (by id) that the model uses past their layers, too
        self.test: Callable[[Any, tuple[bool, ...]], Tested | None]
        self.tested: dict[Any, Tested | None] = {}
        self.sized = False  # whether room for rounding follows from what the test has found
        self.grown = False  # whether a pass since the last loss was the first of its kind
        self.handles: list[Any] = []  # of hooks that detach() removes
        self.amp_before: Any = None  # what the optimiser said of gradient scalers
        self.info: BatchInfo | None = None
        self.draw: Draw | None = None
        self.released = self._skip = False  # whether the step to come has noisy gradients already; has none
        self._broken: int | None = None  # the draw in which a backward pass failed
        self.trained = {id(p) for p in release.parameters}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [names[id(p)] for p in release.parameters]

    @property
    def plan(self) -> Plan | OpenPlan:
        """The layers and what limits them, in the present mode."""
        return self.sensitivity.plan

    @property
    def records(self) -> int:
        """Rows that the present batch has in the model."""
        return 0 if self.info is None else self.info.rows * self.engine.views

    def drop(self) -> None:
        """Forget what was collected; nothing of it was released."""
        self.release.clear()
        if self.quantiles is not None:
            self.quantiles.clear()
        self.draw = None

    def hand_out(self, info: BatchInfo) -> None:
        """The loader's next batch. A draw that was abandoned half-way is dropped, never released."""
        before = self.info
        self.entrance.next_batch(info.first or before is None or before.draw == self._broken)
        if info.piece == 0 and not (before is None or before.last):
            self.drop()
        self.info = info
        self.gate.clear()
        self.randomness.next_batch()
        # an autocast context around several steps would go on with its casts of weights from before the last one
        torch.clear_autocast_cache()

    # -- admit, limits -----------------------------------------------------------------------------------------------

    def admit(self, values: list[Tensor]) -> tuple[list[Argument], Tensor | None]:
        """A loss of these outputs may be taken, with limits up to date; (its arguments, which rows are records)."""
        with _ONE_LOSS:  # two threads must not both be admitted
            info, modes, views = self.admit_batch(), self.watch.modes(), self.engine.views
            is_open = self.plan.graph is None
            arguments = self.gate.enter(values, self.records, views, modes, is_open)
            passage, value = arguments[0].passage, arguments[0].value
            if not passage.compiled and passage.batch is not info:
                raise ContractError(
                    "the loss was taken of an output that the model returned before the loader gave this batch: a "
                    "record would count in a step that did not draw it. Call the model on every batch, then take its "
                    "loss."
                )
            grown = self._test(passage, [argument.end for argument in arguments])
            autocast = passage.autocast
            if autocast is None and value.dtype in (torch.bfloat16, torch.float16):
                autocast = value.dtype
            if autocast == torch.float16:
                raise ContractError("float16 overflows depending on the data: use torch.autocast with bfloat16.")
            settings = (autocast, modes, tuple(value.shape[1:]) if len(arguments) == 1 else ())
            if self.draw is None:
                self.drop()  # empty, unless a step was interrupted between its charge and its end
                self.sensitivity.update(*settings)
                self.release.begin(self.sensitivity.values)
                self.draw = Draw(info.draw, settings)
            elif grown:  # what is allowed for rounding; limits themselves are constants
                self.sensitivity.update(*settings)
            elif not is_open and settings != self.draw.settings:
                raise ContractError("autocast, train()/eval() or the shape of the output changed within one draw.")
            self.reserve(self.draw, info)
            return arguments, None if info.mask is None else info.mask.repeat_interleave(views)

    def admit_batch(self) -> BatchInfo:
        """The batch whose loss may be taken now; raises where the contract or the budget does not allow it."""
        info, draw = self.info, self.draw
        if info is None:
            raise ContractError(
                "the private criterion needs a new batch of the private loader for every step: iterate the returned "
                "loader."
            )
        if info.draw == self._broken and info.piece > 0:
            raise ContractError(
                "a backward pass over this draw failed: leave its other pieces, and go on with the next."
            )
        self.entrance.refuse_ahead()
        self._broken = None
        if draw is not None and draw.number != info.draw:
            self.drop()  # so that a loop that is started again finds a clean state
            raise ContractError("two sampled batches in one step: call optimizer.step() after every batch.")
        if draw is not None and info.piece in draw.pieces:
            raise ContractError("the loss was already taken on this batch: one differentiable call per batch.")
        self.engine.refuse_overspending()
        self.watch.check()
        return info

    def reserve(self, draw: Draw, info: BatchInfo) -> None:
        """The present piece has its loss from here on: before any code of the user's runs that could take another."""
        draw.pieces.add(info.piece)
        draw.ready = False

    def give_back(self) -> None:
        """The loss could not be computed: it may be tried again."""
        if self.info is not None and self.draw is not None:
            self.draw.pieces.discard(self.info.piece)
            self.draw = self.draw if self.draw.pieces else None

    def forget_other_code(self) -> bool:
        """What was tested with other hooks or another forward counts for nothing; whether there were any."""
        if not self.watch.changed():
            return False
        self.tested.clear()
        self.rowwise = False
        return True

    def _test(self, passage: Passage, ends: list[int]) -> bool:
        """Records of this public shape, in these modes, must have passed the test of independence; whether it was new.

        Which promise needs it: record independence (SOUNDNESS section 7, i), and rows that are records (b).
        """
        key = passage.signature, passage.modes
        self.forget_other_code()
        new, self.grown = self.grown or key not in self.tested, False
        if key not in self.tested:
            self.tested[key] = self.test(*key)
        found = self.tested[key]
        if found is not None and not found.outputs.issuperset(ends):
            raise ContractError("the loss got an output of the model that has no row for each record.")
        return new

    # -- collect -----------------------------------------------------------------------------------------------------

    def check_upstream(self, upstream: Tensor) -> None:
        """The loss must reach backward() as it is, or times the declared scale; the engine's own sum ignores it.

        On a device this waits, so that it is done at the first steps and every 64th: nothing private depends on it.
        """
        if upstream.is_cpu or self.engine.steps < 2 or self.engine.steps % 64 == 0:
            factor, scales = float(upstream), (1.0, self.engine.loss_scale)
            if factor not in scales and not any(math.isclose(factor, allowed, rel_tol=1e-6) for allowed in scales):
                self.drop()
                raise ContractError(
                    f"the private loss was multiplied by {factor:g} before backward(): call backward() on the "
                    "loss itself, or declare the constant with make_private(loss_scale=...)."
                )

    def collect(self, passage: Passage, draw: Draw | None, mask: Tensor | None = None) -> None:
        """A backward pass of its own, from the model's outputs with the loss's gradients, into the draw's sum.

        It runs inside the user's backward pass. ``draw`` is what the loss was taken into: a loss that is older than the
        present sum belongs to a draw that was released or dropped.
        """
        if draw is None or draw is not self.draw:
            raise ContractError("backward() of a loss from an earlier draw: its batch was released or dropped already.")
        for parameter in self.release.parameters:
            parameter.grad = None
        try:
            self.run_backward(passage, self.release.leaves, mask)
            self.release.end_batch()
        except BaseException:  # what is left of this draw lacks records: it must not be released, whoever goes on
            self._broken = None if self.info is None else self.info.draw
            self.drop()
            raise
        draw.ready = True

    def run_backward(self, passage: Passage, leaves: Sequence[Tensor], mask: Tensor | None = None) -> None:
        """Products of all private layers go to the sum; ``leaves`` (the parameters) must get nothing from autograd."""
        # activations that are computed again may draw again
        drawing = self.randomness.scope() if self.draws else contextlib.nullcontext()
        ends, gradients = [passage.ends[i] for i in passage.given], list(passage.given.values())
        self.collector.passes.signature = passage.signature, passage.modes  # rows are whose they were in the test
        with self.collector.collection(ends[0].shape[0], mask), drawing:
            stray = self.collector.backward(ends, gradients, leaves)
            if stray:
                raise ContractError(
                    f"parameter '{self._names[stray[0]]}' reaches the loss outside its private layer, where nothing "
                    "limits its gradient: use it through its layer only (a penalty on weights: weight_decay)."
                )

    def refuse_term(self, parameter: Tensor) -> None:
        """Post-accumulate hook: products come by the collector, so this gradient is of another term of the loss."""
        if parameter.grad is None:  # a private layer's backward passed by
            return
        parameter.grad = None
        self.drop()
        raise ContractError(
            "a term besides the private loss reaches the model's parameters, and its gradient would not be private: "
            "remove it (for an L2 penalty use the optimiser's weight_decay)."
        )

    # -- charge, release ---------------------------------------------------------------------------------------------

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Step pre-hook of the optimiser: after the last piece of a draw its gradients are the release."""
        refuse_scaler(optimizer)
        evaluated = evaluate_closure(args, kwargs)
        if self.released:  # a fused step has charged and set its gradients already
            self.released = self._skip = False
            refuse_strangers(optimizer, self.trained)
            return evaluated
        self.engine.refuse_overspending()
        info, draw = self.info, self.draw
        if info is None or draw is None or info.piece not in draw.pieces or not draw.ready:
            raise ContractError("step() without a new batch: call loss(model(x), y).backward() on a batch first.")
        refuse_strangers(optimizer, self.trained)
        self._skip = not info.last
        if self._skip:  # a piece of a larger draw: with no gradients the optimiser does nothing
            for parameter in self.release.parameters:
                parameter.grad = None
        else:
            self.spend(self.release_sum if self.alone else functools.partial(release_together, self))
        return evaluated

    def spend(self, release: Callable[[int], None]) -> None:
        """Charge one release of the present draw, then make it: a second one would be no fresh sample.

        Charge first: an interruption after that line may waste budget but never hides a release. Several processes
        first see that they are at the same step.
        """
        self.draw = self.info = None  # a charge that fails leaves no draw half spent
        if self.engine.shards is not None:
            self.engine.shards.refuse_gradients()
        if not self.alone or (dist.is_available() and dist.is_initialized()):  # a group that came late is refused there
            agree_on_step(self)
        release(self.engine.charge())

    def release_sum(self, step: int, largest: Tensor | None = None) -> None:
        """The whole sum with its noise, scaled for the ``largest`` sensitivities where several processes have some."""
        found, streams = self.sensitivity, self.engine.streams.for_release(step, self.content)
        values, factors = (found.values, found.factors) if largest is None else (largest, None)
        self.release.release(values, streams, step, factors)
        self.adapt(streams, step)

    def adapt(self, streams: Streams | None, step: int) -> None:
        """Limits follow the counts of this release, on the first process; the others hear of them."""
        if self.quantiles is not None and streams is not None and (self.alone or self.engine.ranks.first):
            self.quantiles.release(streams, step)
        elif self.quantiles is not None:
            self.quantiles.clear()

    def mask_key(self, call: int) -> bytes:
        """The secret key of what the model draws in its ``call``-th pass over the present piece."""
        piece = -1 if self.info is None else self.info.place
        return self.engine.streams.key(FORWARD, self.engine.steps, piece, call)

    def content(self) -> bytes:
        """What the noise of a seeded run is keyed by: weights, limits, and the sums that it is added to."""
        counts = [] if self.quantiles is None else self.quantiles.tensors()
        content = itertools.chain(self.release.weights(), self.model.buffers(), self.release.collected(), counts)
        return tensors_digest(content, self.engine.streams.key("weightclip/digest"))

    def after_step(self, *_: Any) -> None:
        """Step post-hook: weights are clipped, with ``Bounds.refresh`` every that many steps (drift is bounded)."""
        if not self._skip:
            self.gate.clear()
            due = self.engine.steps % self.engine.bounds.refresh == 0
            if due and (self.clip.due or self.plan.graph is not None):  # norms it finds serve the next certificate
                self.clip()
