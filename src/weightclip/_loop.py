"""What the engine does between two batches: checks the contract, collects certified gradients, releases their sum."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._adaptive import Quantiles
from weightclip._criterion import PrivateCriterion
from weightclip._digest import tensors_digest
from weightclip._example import Call
from weightclip._gains import Gains, WeightClipper, numerics_for
from weightclip._gate import Argument, Entrance, OutputGate, Passage
from weightclip._install import Tested, test_records
from weightclip._knorm import Entrywise
from weightclip._ledger import Ledger
from weightclip._open import OpenPlan
from weightclip._randomness import ForwardRandomness
from weightclip._record import Recorder
from weightclip._release import Release
from weightclip._streams import Streams
from weightclip._validate import evaluate_closure, refuse_scaler
from weightclip._watch import Watch, refuse_stray_gradients
from weightclip.certificate import Evaluation, Plan, build_plan
from weightclip.config import Bounds
from weightclip.errors import BudgetSpent, CertificationError, ContractError
from weightclip.factors import Collector, Limits, Product
from weightclip.losses import Loss
from weightclip.sampling import BatchInfo, PoissonLoader

_NOT_FINITE = (
    "weights are no longer finite, or far too large: training stops here; the last saved checkpoint is untouched. "
    "Lower the learning rate or set Bounds(weight_norm=...)."
)
_OVERFLOW = 1e35  # l2 bound of a layer's input
_ONE_LOSS = threading.RLock()


class TrainingLoop:
    """One step at a time: on_batch -> begin_loss -> collect (in backward) -> before_step -> after_step.

    Formal guarantees:
        The sum that is released holds, for each record of one draw, once, products that were limited to what its noise
        is scaled for (:class:`weightclip.factors.Collector`), and nothing else: a gradient that reaches a parameter by
        any other way raises.
    """

    model: nn.Module | None
    optimizer: torch.optim.Optimizer
    loader: PoissonLoader
    criterion: PrivateCriterion
    bounds: Bounds
    streams: Streams
    device: torch.device
    budget: int | None
    steps: int
    _ledger: Ledger | None
    plan: Plan | OpenPlan
    _plans: dict[tuple[bool, ...], Plan | OpenPlan]
    _tested: dict[Any, Tested | None]  # by (signature, modes)
    _grown: bool = False  # whether a pass since the last loss was the first of its kind
    _entrance: Entrance
    output_shape: tuple[int, ...]  # of one record of the model's output
    _loss_bounds: dict[tuple[int, ...], float]
    _call: Call  # how the model is called
    _loss: Loss
    _gains: Gains
    _clip: WeightClipper
    _release: Release
    _gate: OutputGate
    _randomness: ForwardRandomness
    _watch: Watch
    _collector: Collector
    _limits: Limits
    _shares: list[float]  # of each layer's sensitivity, the part that is its limit
    _handles: list[Any]  # of hooks that detach() removes
    _amp_before: Any = None
    _model_draws: bool = False
    products: dict[str, Product]
    noise_multiplier: float
    expected_batch_size: float
    _trained: set[int]
    _names: list[str]  # of the parameters, in the order of the release
    _settings: tuple[Any, ...]
    _sensitivities: Tensor
    _factors: Tensor | None  # of the noise, where they were computed with the sensitivities
    _reach: Tensor | None = None  # l2 bounds of layers' inputs, where they were computed with them
    _recorder: Recorder
    _constants: dict[Any, tuple[Tensor, Tensor | None, Tensor | None]]  # sensitivities that do not depend on weights
    _autocast: torch.dtype | None
    _info: BatchInfo | None
    _skip: bool = False
    _broken: int | None = None  # the draw in which a backward pass failed
    _released: bool = False  # whether the gradients of the step to come are noisy already
    views: int = 1  # augmentation multiplicity
    loss_scale: float = 1.0  # what may stand above the loss in backward()
    _quantiles: Quantiles | None = None
    _entrywise: Entrywise | None = None

    def _reset_batch(self) -> None:
        self._graded: set[tuple[int, int]] = set()  # (draw, piece) whose loss was taken since the last release
        self._backward_seen = False  # whether the present piece's gradients are in the sum

    def _drop_sum(self) -> None:
        """Forget what was collected; nothing of it was released."""
        self._release.clear()
        if self._quantiles is not None:
            self._quantiles.clear()
        self._reset_batch()

    def _steps_left(self) -> int | None:
        return None if self.budget is None else max(0, self.budget - self.steps)

    def _refuse_overspending(self) -> None:
        if self.budget is not None and self.steps >= self.budget:
            raise BudgetSpent("the privacy budget is spent: no further step may be released.")

    def _on_batch(self, info: BatchInfo) -> None:
        complete = self._info is None or self._info.last
        if info.piece == 0 and not complete:  # a draw was abandoned half-way: its sum is dropped, never released
            self._drop_sum()
        self._info = info
        self._gate.clear()
        self._randomness.next_batch()
        # an autocast context around several steps would go on with its casts of weights from before the last one
        torch.clear_autocast_cache()

    # -- the loss -----------------------------------------------------------------------------------------------------

    def _records(self) -> int:
        """Rows that the present batch has in the model."""
        return 0 if self._info is None else self._info.rows * self.views

    def _begin_loss(self, values: list[Tensor]) -> tuple[list[Argument], Tensor | None]:
        """Called by the criterion: checks the contract, brings the bounds up to date; (arguments, batch's mask)."""
        with _ONE_LOSS:  # two threads must not both be admitted
            return self._begin(values)

    def _begin(self, values: list[Tensor]) -> tuple[list[Argument], Tensor | None]:
        info = self._admit()
        arguments = self._gate.enter(values, self._records(), self._watch.modes(), self.plan.graph is None)
        passage, value = arguments[0].passage, arguments[0].value
        if not passage.compiled and passage.batch is not info:
            raise ContractError(
                "the loss was taken of an output that the model returned before the loader gave this batch: a record would "
                "count in a step that did not draw it. Call the model on every batch, and take the loss before the next."
            )
        if len({argument.fold for argument in arguments}) > 1:
            raise ContractError("the loss got outputs with different numbers of rows: fold positions into all or none.")
        grown = self._test(passage, [argument.end for argument in arguments])
        autocast = passage.autocast
        if autocast is None and value.dtype in (torch.bfloat16, torch.float16):
            autocast = value.dtype
        if autocast == torch.float16:
            raise ContractError("float16 overflows depending on the data: use torch.autocast with bfloat16.")
        shape = tuple(value.shape[1:]) if len(arguments) == 1 else ()
        settings = (autocast, self._watch.modes(), shape)
        if not self._graded:
            self._drop_sum()  # empty, unless a step was interrupted between its charge and its end
            self._settings = settings
            self._certify_step(*settings)
        elif grown:  # what is allowed for rounding; limits themselves are constants
            self._certify_step(*settings)
        elif self.plan.graph is not None and settings != self._settings:
            raise ContractError("autocast, train()/eval() or the shape of the output changed within one draw.")
        self._reserve(info)
        return arguments, info.mask if info.mask is None else info.mask.repeat_interleave(self.views)

    def _test(self, passage: Passage, ends: list[int]) -> bool:
        """Records of this public shape, in these modes, must have passed the test of independence; whether it was new.

        Which promise needs it: record independence (SOUNDNESS section 7, i), and rows that are records (b).
        """
        key = passage.signature, passage.modes
        new, self._grown = self._grown or key not in self._tested, False
        if key not in self._tested:
            self._tested[key] = test_records(self, *key)  # type: ignore[arg-type]
        found = self._tested[key]
        if found is not None and not found.outputs.issuperset(ends):
            raise ContractError("the loss got an output of the model that has no row for each record.")
        return new

    def _admit(self) -> BatchInfo:
        """The batch whose loss may be taken now; raises where the contract or the budget does not allow it."""
        info = self._info
        if info is None:
            raise ContractError(
                "the private criterion needs a new batch of the private loader for every step: iterate the returned "
                "loader."
            )
        if info.draw == self._broken and info.piece > 0:
            raise ContractError(
                "a backward pass over this draw failed: leave its other pieces, and go on with the next."
            )
        self._broken = None
        if (info.draw, info.piece) in self._graded:
            raise ContractError("the loss was already taken on this batch: one differentiable call per batch.")
        if any(draw != info.draw for draw, _ in self._graded):
            self._drop_sum()  # so that a loop that is started again finds a clean state
            raise ContractError("two sampled batches in one step: call optimizer.step() after every batch.")
        self._refuse_overspending()
        self._watch.check()
        return info

    def _reserve(self, info: BatchInfo) -> None:
        """The present piece has its loss from here on: before any code of the user's runs that could take another."""
        self._graded.add((info.draw, info.piece))
        self._backward_seen = False

    def _unreserve(self) -> None:
        """The loss could not be computed: it may be tried again."""
        if self._info is not None:
            self._graded.discard((self._info.draw, self._info.piece))

    def _certify_step(self, autocast: torch.dtype | None, modes: tuple[bool, ...], shape: tuple[int, ...]) -> None:
        """Sensitivities of this step, and the limits that make them true whatever the certificate knows."""
        self._find_sensitivities(autocast, modes, shape)
        self._set_limits()

    def _set_limits(self) -> None:
        """Every layer with a limit of its own is limited to what this release's noise is scaled for.

        In a recording this is part of the branch that looks at weights, which the backward pass waits for.
        """
        if self._recorder.aside is None:
            # with quantiles limits are written by others too, and sensitivities never come from the cache
            self._limits.set(self._sensitivities, constant=self._quantiles is None and self._gains.weightless)
        else:
            with torch.cuda.stream(self._recorder.aside):
                self._limits.set(self._sensitivities)

    def _find_sensitivities(
        self, autocast: torch.dtype | None, modes: tuple[bool, ...], shape: tuple[int, ...]
    ) -> None:
        """Sensitivities: at the present weights, in the present modes, for the loss's actual argument."""
        self._use_mode(modes)
        self._autocast = autocast
        if shape not in self._loss_bounds:
            self._loss_bounds[shape] = self.criterion.loss.bound(shape, self.bounds.p)
        self.plan.loss_bound, self.plan.loss_shape = self._loss_bounds[shape], shape
        often = self.device.type == "cpu" or self.steps % 64 == 0  # on a device this waits for it
        plain = self._quantiles is None and self._entrywise is None
        if plain and (self.device.type != "cpu" or self._gains.weightless):
            self._sensitivities, self._factors, self._reach = self._recorded()
            if often and not self._fit():
                raise ContractError(_NOT_FINITE)
            return
        try:
            evaluations = self._evaluate()
            self._sensitivities, self._factors = self._release.sensitivities(evaluations), None
        except CertificationError:  # an infinite weight looks like a layer without a bound
            if self._release.finite():
                raise
            raise ContractError(_NOT_FINITE) from None
        on_host = self._sensitivities.device.type == "cpu"
        finite: Any = all(map(math.isfinite, self._sensitivities.tolist())) if on_host else (
            torch.isfinite(self._sensitivities).all()
        )  # fmt: skip
        if often and not self.plan.needs_gains:  # the bounds do not look at the weights then
            finite = finite & self._release.finite()
        # an activation beyond float32 would make its record's gradient NaN, and with it the sum
        huge = often and any(_OVERFLOW < float(e.x) < math.inf for e in evaluations.values())
        if often and (huge or not bool(finite)):
            raise ContractError(_NOT_FINITE)

    def _fit(self) -> bool:
        """Whether the last bounds and the present weights are finite and not far too large; waits for the device."""
        fit: Any = self._release.finite()
        if not self._sensitivities.is_cpu:
            fit = fit & torch.isfinite(self._sensitivities).all()
        if self._reach is not None:
            fit = fit & ~((self._reach > _OVERFLOW) & (self._reach < math.inf)).any()
        return bool(fit)

    def _recorded(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Sensitivities, factors of the noise and l2 bounds of inputs: recorded, and replayed while only values change.

        The key holds what the evaluation reads besides the values of weights and buffers: the graph of the present
        mode, how passes round, the loss's bound, where tensors lie, and whether clipping has left norms to start from.
        """
        numerics, plan = numerics_for(self.device, self._autocast), self.plan
        constant = (id(plan), numerics, plan.loss_bound, plan.loss_shape)
        if constant in self._constants:
            return self._constants[constant]

        def work() -> tuple[Tensor, Tensor | None, Tensor | None]:
            evaluations = self._evaluate()
            sensitivities = self._release.sensitivities(evaluations)
            if sensitivities.device.type == "cpu":
                return sensitivities, None, None
            with torch.no_grad():
                reach = [e.x.double() for e in evaluations.values() if isinstance(e.x, Tensor)]
                return sensitivities, self._release.factors(sensitivities), torch.stack(reach) if reach else None

        if self._gains.weightless:
            return self._constants.setdefault(constant, work())
        if self._gains.refresh > 1:  # takes snapshots on its way
            return work()
        found = self._recorder(("bounds", *constant, self._gains.clipped, self._watch.addresses()), work)
        if self.device.type != found[0].device.type:  # plain numbers: no weight was looked at
            self._constants[constant] = found
        return found

    def _use_mode(self, modes: tuple[bool, ...]) -> None:
        """train() and eval() are different functions: each has a graph of its own."""
        assert self.model is not None
        if self.plan.graph is None:
            return
        if modes not in self._plans:
            plan = build_plan(self.model, self.criterion.loss, self.bounds, self._call.args)
            if list(plan.layers) != list(self.plan.layers):
                raise ContractError(
                    "train() and eval() use other layers: make the model private in the mode it trains in."
                )
            if self._quantiles is not None and any(len(u) != len(self.plan.layers[k]) for k, u in plan.layers.items()):
                raise ContractError(
                    "train() and eval() use layers a different number of times: adaptive limits refuse."
                )
            plan.quantiles = self._quantiles
            self._plans[modes] = plan
        if self._plans[modes] is not self.plan:
            self.plan = self._release.plan = self._gains.plan = self._plans[modes]
            self._gains.reset()

    def _evaluate(self) -> dict[str, Evaluation]:
        numerics = numerics_for(self.device, self._autocast)
        with torch.no_grad():
            found = self.plan.evaluate(numerics, self._gains.current(numerics, self.steps))
            if self._entrywise is None or not isinstance(self.plan, Plan):
                return found
            return self._entrywise(self.plan, found, numerics)

    # -- the backward pass --------------------------------------------------------------------------------------------

    def _collect(self, passage: Passage, graded: set[tuple[int, int]], mask: Tensor | None = None) -> None:
        """A backward pass of its own, from the model's outputs with the loss's gradients, into the engine's sum.

        It runs inside the user's backward pass. ``graded`` is what the loss was taken into: a loss that is older than
        the present sum belongs to a draw that was released or dropped.
        """
        if graded is not self._graded:
            raise ContractError("backward() of a loss from an earlier draw: its batch was released or dropped already.")
        for block in self._release.blocks:
            block.parameter.grad = None
        try:
            self._pass(passage, self._release.parameters, mask)
        except BaseException:  # what is left of this draw lacks records: it must not be released, whoever goes on
            self._broken = None if self._info is None else self._info.draw
            self._drop_sum()
            raise
        self._backward_seen = True

    def _check_upstream(self, upstream: Tensor) -> None:
        """The loss must reach backward() as it is, or times the declared scale; the engine's own sum ignores it.

        On a device this waits, so that it is done at the first steps and every 64th: nothing private depends on it.
        """
        if upstream.is_cpu or self.steps < 2 or self.steps % 64 == 0:
            factor = float(upstream)
            if not any(math.isclose(factor, allowed, rel_tol=1e-6) for allowed in (1.0, self.loss_scale)):
                self._drop_sum()
                raise ContractError(
                    f"the private loss was multiplied by {factor:g} before backward(): call backward() on the "
                    "loss itself, or declare the constant with make_private(loss_scale=...)."
                )

    def _pass(self, passage: Passage, leaves: Sequence[Tensor], mask: Tensor | None = None) -> None:
        """Products of all private layers go to the sum; ``leaves`` (the parameters) must get nothing from autograd."""
        # activations that are computed again may draw again
        drawing = self._randomness.scope() if self._randomness.draws else contextlib.nullcontext()
        ends, gradients = [passage.ends[i] for i in passage.given], list(passage.given.values())
        self._collector.passes.signature = passage.signature, passage.modes  # rows are whose they were in the test
        with self._collector.collection(ends[0].shape[0], mask), drawing:
            stray = self._collector.backward(ends, gradients, leaves)
            if stray:
                raise ContractError(
                    f"parameter '{self._names[stray[0]]}' reaches the loss outside its private layer, where nothing "
                    "limits its gradient: use it through its layer only (a penalty on weights: weight_decay)."
                )

    def _drop(self, parameter: Tensor) -> None:
        """Post-accumulate hook: products come by the collector, so this gradient is of another term of the loss."""
        if parameter.grad is None:  # a private layer's backward passed by
            return
        parameter.grad = None
        self._drop_sum()
        raise ContractError(
            "a term besides the private loss reaches the model's parameters, and its gradient would not be private: "
            "remove it (for an L2 penalty use the optimiser's weight_decay)."
        )

    # -- the step -----------------------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        refuse_scaler(optimizer)
        evaluated = evaluate_closure(args, kwargs)
        self._release_step(optimizer)
        return evaluated

    def _release_step(self, optimizer: torch.optim.Optimizer) -> None:
        """What a call of ``step()`` releases: nothing before the last piece of a draw."""
        if self._released:  # a fused step has charged and set its gradients already
            self._released = self._skip = False
            refuse_stray_gradients(optimizer, self._trained)
            return
        self._refuse_overspending()
        info = self._info
        if info is None or (info.draw, info.piece) not in self._graded or not self._backward_seen:
            raise ContractError("step() without a new batch: call loss(model(x), y).backward() on a batch first.")
        refuse_stray_gradients(optimizer, self._trained)
        self._skip = not info.last
        if self._skip:  # a piece of a larger draw: with no gradients the optimiser does nothing
            for block in self._release.blocks:
                block.parameter.grad = None
            return
        # charge first: an interruption after this line may waste budget but never hides a release
        step = self._charge()
        streams = self.streams.for_release(step, self._content)
        self._release.release(self._sensitivities, streams, step, self._factors)
        if self._quantiles is not None:
            self._quantiles.release(streams, step)

    def _content(self) -> bytes:
        """What the noise of a seeded run is keyed by: weights, limits, and the sums that it is added to."""
        assert self.model is not None
        counts = [] if self._quantiles is None else self._quantiles.tensors()
        content = (*self._release.parameters, *self.model.buffers(), *self._release.sums, *counts)
        return tensors_digest(content, self.streams.key("weightclip/digest"))

    def _charge(self) -> int:
        """Count one release of the present draw, which is spent by it: a second one would not be a fresh sample.

        With a ledger the count is on the disk when this returns; its number is one no run on the ledger ever had.
        """
        self._reset_batch()  # first: a charge that fails leaves no draw half spent
        self._info = None
        step = self.steps if self._ledger is None else self._ledger.charge(self._steps_left())
        self.steps = step + 1
        return step

    def _after_step(self, *_: Any) -> None:
        if not self._skip:
            self._gate.clear()
            self._clip()
