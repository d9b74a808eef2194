"""Putting an engine on a model and taking it off again: private layers, doors, hooks, and the test of independence."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, autocast, nn

from weightclip._torch import forward_hooks
from weightclip.certificate import Adaptive, OpenPlan, Plan
from weightclip.engine._entrance import BufferGuard, Entrance, InputProjection, Signature, buffers_kept, look, prepare
from weightclip.engine._example import Call
from weightclip.engine._gate import OutputGate, draws_nothing
from weightclip.engine._independence import (
    Facts,
    MixesRecords,
    Probe,
    acts_on_rows,
    check_independence,
    refuse_mixing,
)
from weightclip.errors import CertificationError, ContractError
from weightclip.factors import Collector, Entry, Limits, know_parameters, make_layer_plain, make_layer_private
from weightclip.noise import Quantiles, sum_slack
from weightclip.sampling import ForwardRandomness

if TYPE_CHECKING:
    from weightclip.engine._step import Training


@dataclass(frozen=True)
class Tested:
    """What the test of independence has established for records of one public shape, in one choice of modes.

    Attributes:
        outputs: Which of the tensors that the model returns have a row for each record.
        shape: Of one record of the first such output.
    """

    outputs: frozenset[int]
    shape: tuple[int, ...] = ()


def with_room(plan: Plan | OpenPlan, slack: list[float]) -> tuple[list[float], list[float]]:
    """Slack of every layer with room for the rounding of its limit, and the limit's share of the sensitivity.

    A cap is enforced as it stands. A certified bound gets the room twice: the limit lies above the bound by as much
    as norms may round, so that where the certificate is true no record is ever scaled.
    """
    found, of = [], plan.bounds.of
    for path, s in zip(plan.layers, slack, strict=True):
        capped = of("layer_cap", path) is not None or of("joint_cap", path) is not None
        room = plan.room(path)
        found.append((s * room if capped else s * room**2, 1 / (s * room)))
    return [s for s, _ in found], [share for _, share in found]


def install(t: Training) -> None:
    """Turn the layers private, put the doors on the model, and hook the optimiser."""
    t.rowwise = acts_on_rows(t.model)
    if t.engine.shards is not None:
        t.engine.shards.rest()
        t.engine.shards.sync(False)
    bounds, device, optimizer = t.engine.bounds, t.engine.device, t.engine.optimizer
    of, places = bounds.of, {id(parameter): i for i, parameter in enumerate(t.release.parameters)}
    places |= {id(leaf): i for i, leaf in enumerate(t.release.leaves)}
    t.collector = Collector(t.release.add, bounds.caps_of(""), t.drop, getattr(t.release, "settled", None))
    for path in t.plan.layers:
        layers, cap, joint = t.plan.holders(path), of("layer_cap", path), of("joint_cap", path)
        bound = joint is None and (cap is None or t.release.knorm is not None)  # that one's norm is entrywise
        for layer in layers:
            shared = len(layers) > 1 or any(id(p) in t.strays for p in layer.parameters(recurse=False))
            make_layer_private(
                layer, radius=of("layer_radius", path), cotangent=of("cotangent_radius", path),
                cap=math.inf if bound else cap, beta=of("bias_scale", path) or 1.0, product=t.products[path],
                caps=bounds.caps_of(path), bound=bound, shared=shared,
            )  # fmt: skip
        measure = t.plan.measure(path, t.release.knorm) if bound else None
        t.collector.enter(Entry.of(layers[0], places, 1, joint, measure, layers[1:]))
        if t.engine.shards is not None:
            for layer in layers:
                know_parameters(layer, (t.engine.shards.twins[id(p)] for p in layer.parameters(recurse=False)))
    t.entrance = Entrance(t.call, t.plan.graph is not None, t.collector.anchor)
    if t.plan.graph is not None:
        t.entrance.look = functools.partial(look, weakref.ref(t))
    t.gate = OutputGate(t, device, t.entrance)
    t.randomness = ForwardRandomness(device, t.mask_key, t.draws, functools.partial(draws_nothing, weakref.ref(t)))
    before, after = t.randomness.hooks()
    # ahead of the hooks that users have, which may draw too; moved only where it must be (torch 2.10 compiles no other)
    behind, is_open, passes = bool(forward_hooks(t.model)), t.plan.graph is None, t.collector.passes
    first = [lambda: t.model.register_forward_pre_hook(before, prepend=behind)]
    if is_open:
        passes.prepare = functools.partial(prepare, weakref.ref(t))
        first.insert(0, lambda: passes.watch(t.model, moved=behind))
    t.handles = [register() for register in (reversed(first) if behind else first)]
    projections = {"": math.inf, **bounds.projections()}
    detach = bounds.p != 2  # an l2 projection expands other norms unless its scale is a constant
    for path, radius in projections.items():
        part = t.model.get_submodule(path)
        t.handles.append(part.register_forward_pre_hook(InputProjection(radius, detach), with_kwargs=True))
    t.handles.append(t.model.register_forward_pre_hook(t.entrance, with_kwargs=True))
    t.buffers = BufferGuard(t.model, t.engine.shards is None)  # whose parts stand in for parameters during a pass
    t.handles.append(t.model.register_forward_pre_hook(t.buffers.before))
    t.handles.append(t.model.register_forward_hook(t.buffers.after))
    t.handles.append(t.model.register_forward_hook(t.gate))
    t.handles.append(t.model.register_forward_hook(after, always_call=True))
    if is_open:
        t.handles.append(passes.watch_end(t.model))
    for parameter in {id(p): p for p in (*t.release.parameters, *t.release.leaves)}.values():
        parameter.grad = None
        t.handles.append(parameter.register_post_accumulate_grad_hook(t.refuse_term))
    t.handles.append(optimizer.register_step_pre_hook(t.before_step))
    t.handles.append(optimizer.register_step_post_hook(t.after_step))
    t.amp_before = optimizer.__dict__.get("_step_supports_amp_scaling")
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined] # so that a GradScaler reaches us
    t.watch.changed()  # from here on


def test_records(t: Training, signature: Signature, modes: tuple[bool, ...], size: int = 1) -> Tested | None:
    """One record must not change another's products, on random public records of this shape; None: it could not run.

    A plan without a graph learns from it which layers are used, how often, and on how much of a record.
    """
    model, call = t.model, t.entrance.call(signature)
    if t.engine.shards is not None and signature != t.entrance.first:
        raise ContractError(
            "records of another shape came than make_private saw: under fully_shard all ranks must run the same "
            "passes, and this rank alone would have to test the new shape. Give all records one shape (padding)."
        )

    @contextlib.contextmanager
    def uncut(masks: int) -> Iterator[None]:  # the model's output with its graph behind it, and masks held fixed
        owner, t.gate.owner = t.gate.owner, None
        t.randomness.next_batch(masks)
        try:
            yield
        finally:
            t.gate.owner = owner

    again = t.randomness.scope if t.draws else contextlib.nullcontext
    probe = Probe(model, t.collector, uncut, again, t.release.leaves, t.draws)
    calls, passes = t.randomness.calls, t.collector.passes

    def find_rows() -> None:
        try:
            with uncut(0):
                whole = [lambda n, i=i: call.random(n, 1).with_ones(i)(model) for i in call.masks]
                passes.discover(lambda n: call.random(n, 1)(model), (signature, modes), whole)
        except (RuntimeError, IndexError, ValueError) as error:
            if isinstance(error, ContractError):
                raise  # otherwise random records could not be run: rows must be records

    try:
        # without autocast, whose rounding at other batch sizes would look like mixing
        exact = autocast(t.engine.device.type, enabled=False)
        t.buffers.testing = True
        with in_modes(model, modes), passes.testing((signature, modes)), exact, buffers_kept(model):
            refuse_mixing(model)
            if isinstance(t.plan, OpenPlan):
                find_rows()
            facts = _checked(probe, call, size, t.rowwise and not t.tested)
    finally:
        t.buffers.testing = False
        t.randomness.next_batch(calls)
    if facts is None:
        if t.plan.graph is None:
            raise ContractError(
                "the model could not be run on random records, so that its independence cannot be tested: "
                f"{probe.failure}. Pass example= if its inputs are not found in a batch as they should be."
            ) from probe.failure
        return None
    if isinstance(t.plan, OpenPlan):
        uses = [facts.uses.get(i, []) for i in range(len(t.collector.entries))]
        if t.plan.learn(dict(zip(t.plan.layers, uses, strict=True))) and t.sized:
            size_up(t)
        t.strays.update(id(t.release.parameters[i]) for i in probe.stray)
    outputs = [i for i, sketch in enumerate(facts.outputs) if sketch is not None]
    return Tested(frozenset(outputs), facts.shapes[outputs[0]])


def _checked(probe: Probe, call: Call, size: int, rowwise: bool) -> Facts | None:
    """:func:`check_independence`; a record that is another at another place is looked at again in double precision.

    Where a layer's gradient is nearly nothing, its rounding, which is another at other batch sizes, may be a good part
    of it. In double precision that part is gone, and what one record does to another is not. Values of others in the
    same places change no rounding: such a change is final, in the precision of the model, at all sizes (numbers that
    overflow there do not in double precision).
    """
    try:
        return check_independence(probe, call, size, rowwise)
    except MixesRecords as error:
        if not all(type(p.data) is Tensor for p in probe.model.parameters()):  # parts of parameters stay as they are
            raise
        check_independence(probe, call, size, places=False)
        with in_double(probe.model):
            wide = call.map(lambda t: t.double() if t.is_floating_point() else t)
            try:
                facts = check_independence(probe, wide, size)
            except (RuntimeError, TypeError) as other:
                raise error from other
        if facts is None:  # it does not run in double precision
            raise
        return facts


@contextlib.contextmanager
def in_modes(model: nn.Module, modes: tuple[bool, ...]) -> Iterator[None]:
    """Every module in the mode it had in some pass (:meth:`Watch.modes`)."""
    modules = list(model.modules())
    before = [module.training for module in modules]
    try:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


@contextlib.contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """The model in double precision, the same parameters and buffers; their memory is theirs again afterwards."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    before = [t.data for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def refuse_unused(t: Training) -> None:
    """A trainable layer that no pass uses would get nothing but noise."""
    unused = t.plan.unused() if isinstance(t.plan, OpenPlan) else []
    if unused and not t.draws:  # a model that draws may have left the layer out by chance
        raise CertificationError(
            f"layer '{unused[0]}' is trainable but the model does not use it: it would get nothing but noise. "
            "Fix: freeze it (requires_grad_(False))."
        )


def output_shape(t: Training, tested: Tested | None) -> tuple[int, ...]:
    """Of one record of the model's output."""
    graph = t.plan.graph
    if graph is not None:
        return graph.nodes[graph.output].op.out_shape
    return () if tested is None else tested.shape


def size_up(t: Training) -> None:
    """Room for rounding, and limits, from what is known of every layer's uses."""
    plan = t.plan
    counts = [len(plan.uses(path)) for path in plan.layers]
    entries = t.collector.entries
    if t.quantiles is not None and counts != [entry.uses for entry in entries]:
        raise ContractError("layers are used a different number of times than before: adaptive limits refuse.")
    for entry, count in zip(entries, counts, strict=True):
        entry.uses = count
    physical = t.engine.loader.piece_size
    slack = sum_slack(plan, t.products, t.engine.b_max, physical, t.engine.views)
    if t.release.exact is not None:
        slack = [s * t.release.exact.slack(sum(t.release.dims)) for s in slack]
    t.release.slack, shares = with_room(plan, slack)
    t.sensitivity.forget()
    if t.engine.bounds.adaptive is not None and t.quantiles is None:
        _adapt(t, t.engine.bounds.adaptive)
    moving = [e.joint is None and (e.certified() or t.quantiles is None) for e in entries]
    t.limits = Limits([entry.layer for entry in entries], moving, shares)
    t.sized = True


def _adapt(t: Training, settings: Adaptive) -> None:
    """Limits follow private quantiles; their queries take a part of the step's noise budget."""
    layers = {path: (t.model.get_submodule(path), len(t.plan.uses(path))) for path in t.plan.layers}
    t.quantiles = t.plan.quantiles = Quantiles(
        settings, layers, t.engine.views, t.engine.expected_batch_size, t.engine.noise_multiplier
    )
    t.release.sigma = t.quantiles.gradient_sigma


def uninstall(t: Training) -> None:
    """Undo :func:`install`: hooks removed, layers native, weights as they are."""
    for handle in t.handles:
        handle.remove()
    t.handles.clear()
    if t.engine.shards is not None:
        t.engine.shards.rest()
        t.engine.shards.sync(True)
    t.drop()
    t.info = None
    for module in t.model.modules():
        make_layer_plain(module)
        module.__dict__.pop("_wc_dft", None)
    if t.amp_before is None:
        t.engine.optimizer.__dict__.pop("_step_supports_amp_scaling", None)
    else:
        t.engine.optimizer._step_supports_amp_scaling = t.amp_before  # type: ignore[attr-defined]
