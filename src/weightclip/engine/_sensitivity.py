"""What the noise of the next release is scaled for, and the limits that make it true whatever a certificate knows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weightclip._device import Recorder
from weightclip.certificate import Evaluation, Gains, OpenPlan, Plan, build_plan, numerics_for
from weightclip.errors import CertificationError, ContractError, NotFinite
from weightclip.noise import Entrywise, Release

if TYPE_CHECKING:
    from weightclip.engine._step import Training

_NOT_FINITE = (
    "weights are no longer finite, or far too large: training stops here; the last saved checkpoint is untouched. "
    "Lower the learning rate or set Bounds(weight_norm=...)."
)
_OVERFLOW = 1e35  # l2 bound of a layer's input

Found = tuple[Tensor, Tensor | None, Tensor | None]


class Sensitivities:
    """Delta_k of every layer at the present weights, in the present modes, for the loss's actual argument.

    Attributes:
        plan: The plan of the present mode.
        values: Delta_k, rounding slack included.
        factors: Of the noise, where they were computed with them.
        reach: l2 bounds of layers' inputs, likewise.
        autocast: The type that products of the present pass are cast to.

    Formal guarantees:
        Read weights, buffers, modes and shapes alone: public, or released.
    """

    def __init__(
        self, training: Training, plan: Plan | OpenPlan, release: Release, entrywise: Entrywise | None
    ) -> None:
        self.training, self.plan, self.release, self.entrywise = training, plan, release, entrywise
        self.recorder = Recorder(training.engine.device)
        self.gains = Gains(plan, plan.bounds, self.recorder)
        self._fixed = plan.graph is None  # limits are constants, or follow quantiles
        self.values, self.factors, self.reach = torch.ones(len(plan.layers)), None, None
        self.autocast: torch.dtype | None = None
        modes = tuple(module.training for module in plan.model.modules())
        self._plans: dict[tuple[bool, ...], Plan | OpenPlan] = {modes: plan}
        self._loss_bounds: dict[tuple[int, ...], float] = {}
        self._constants: dict[Any, Found] = {}  # those that no weight enters

    def forget(self) -> None:
        """What is allowed for rounding has changed."""
        self._constants.clear()

    def update(self, autocast: torch.dtype | None, modes: tuple[bool, ...], shape: tuple[int, ...]) -> None:
        """Bring everything up to date for the step to come, limits included."""
        self._find(autocast, modes, shape)
        self.set_limits()

    @property
    def _weightless(self) -> bool:
        return self._fixed or self.gains.weightless

    def set_limits(self) -> None:
        """Every layer with a limit of its own is limited to what this release's noise is scaled for.

        In a recording this is part of the branch that looks at weights, which the backward pass waits for.
        """
        limits = self.training.limits
        if self.recorder.aside is None:
            # with quantiles limits are written by others too, and sensitivities never come from the cache
            limits.set(self.values, constant=self.training.quantiles is None and self._weightless)
        else:
            with torch.cuda.stream(self.recorder.aside):
                limits.set(self.values)

    def evaluate(self) -> dict[str, Evaluation]:
        """Bounds of every layer at the present weights."""
        numerics = numerics_for(self.training.engine.device, self.autocast)
        with torch.no_grad():
            found = self.plan.evaluate(numerics, self.gains.current(numerics, self.training.engine.steps))
            if self.entrywise is None or not isinstance(self.plan, Plan):
                return found
            return self.entrywise(self.plan, found, numerics)

    def fit(self) -> bool:
        """Whether the last bounds and the present weights are finite and not far too large; waits for the device."""
        fit: Any = self.release.finite()
        if not self.values.is_cpu:
            fit = fit & torch.isfinite(self.values).all()
        if self.reach is not None:
            fit = fit & ~((self.reach > _OVERFLOW) & (self.reach < math.inf)).any()
        return bool(fit)

    def use_mode(self, modes: tuple[bool, ...]) -> None:
        """train() and eval() are different functions: where a graph is traced, each has one of its own."""
        if self.plan.graph is None:
            return
        if modes not in self._plans:
            self._plans[modes] = self._trace()
        if self._plans[modes] is not self.plan:
            self.plan = self.release.plan = self.gains.plan = self._plans[modes]
            self.gains.reset()

    def _trace(self) -> Plan:
        engine, quantiles = self.training.engine, self.training.quantiles
        plan = build_plan(self.plan.model, engine.criterion.loss, engine.bounds, self.training.call.args)
        if list(plan.layers) != list(self.plan.layers):
            raise ContractError("train() and eval() use other layers: make the model private in the mode it trains in.")
        if quantiles is not None and any(len(u) != len(self.plan.layers[k]) for k, u in plan.layers.items()):
            raise ContractError("train() and eval() use layers a different number of times: adaptive limits refuse.")
        plan.quantiles = quantiles
        return plan

    def _find(self, autocast: torch.dtype | None, modes: tuple[bool, ...], shape: tuple[int, ...]) -> None:
        engine, on_cpu = self.training.engine, self.training.engine.device.type == "cpu"
        self.use_mode(modes)
        self.autocast = autocast
        if shape not in self._loss_bounds:
            self._loss_bounds[shape] = engine.criterion.loss.bound(shape, engine.bounds.p)
        self.plan.loss_bound, self.plan.loss_shape = self._loss_bounds[shape], shape
        often = on_cpu or engine.steps % 64 == 0  # on a device this waits for it
        plain = self.training.quantiles is None and self.entrywise is None
        if plain and (not on_cpu or self._weightless):
            self.values, self.factors, self.reach = self._recorded()
            if often and not self.fit():
                raise NotFinite(_NOT_FINITE)
            return
        try:
            evaluations = self.evaluate()
            self.values, self.factors = self.release.sensitivities(evaluations), None
        except CertificationError:  # an infinite weight looks like a layer without a bound
            if self.release.finite():
                raise
            raise NotFinite(_NOT_FINITE) from None
        finite: Any = torch.isfinite(self.values).all()
        if often and not self.plan.needs_gains:  # the bounds do not look at the weights then
            finite = finite & self.release.finite()
        # an activation beyond float32 would make its record's gradient NaN, and with it the sum
        huge = often and any(_OVERFLOW < float(e.x) < math.inf for e in evaluations.values())
        if often and (huge or not bool(finite)):
            raise NotFinite(_NOT_FINITE)

    def _recorded(self) -> Found:
        """Sensitivities, factors of the noise and l2 bounds of inputs: recorded, and replayed while only values change.

        The key holds what the evaluation reads besides the values of weights and buffers: the graph of the present
        mode, how passes round, the loss's bound, where tensors lie, and whether clipping has left norms to start from.
        Norms that serve several steps are certified before, and what is recorded looks at how far weights have moved.
        """
        device, plan = self.training.engine.device, self.plan
        constant: Any = id(plan)  # limits that are public constants ask for nothing else
        if plan.graph is not None:
            constant = (constant, numerics_for(device, self.autocast), plan.loss_bound, plan.loss_shape)
        if constant in self._constants:
            return self._constants[constant]

        def work() -> Found:
            evaluations = self.evaluate()
            values = self.release.sensitivities(evaluations)
            if values.device.type == "cpu":
                return values, None, None
            with torch.no_grad():
                reach = [e.x.double() for e in evaluations.values() if isinstance(e.x, Tensor)]
                return values, self.release.factors(values), torch.stack(reach) if reach else None

        if self._weightless:
            return self._constants.setdefault(constant, work())
        if self.gains.renew(numerics_for(device, self.autocast), self.training.engine.steps):  # may wait for the device
            return work()
        places = (self.training.watch.addresses(), self.gains.places)
        found = self.recorder(("bounds", constant, self.gains.clipped, places), work)
        if device.type != found[0].device.type:  # plain numbers: no weight was looked at
            self._constants[constant] = found
        return found
