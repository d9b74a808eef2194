"""Putting an engine on a model and taking it off again: private layers, doors, hooks, and the test of independence."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from weightclip._adaptive import Quantiles
from weightclip._example import Signature
from weightclip._gate import Entrance, OutputGate
from weightclip._independence import Probe, check_independence, refuse_mixing
from weightclip._open import OpenPlan
from weightclip._projection import InputProjection
from weightclip._randomness import FORWARD, ForwardRandomness
from weightclip._release import sum_slack
from weightclip._torch import forward_hooks
from weightclip._watch import BufferGuard, in_modes
from weightclip.config import Adaptive
from weightclip.errors import CertificationError, ContractError
from weightclip.factors import Collector, Entry, Limits, Product, make_layer_plain, make_layer_private
from weightclip.factors._limits import BOUND

if TYPE_CHECKING:
    from weightclip.engine import PrivacyEngine


def with_room(engine: PrivacyEngine, slack: list[float]) -> tuple[list[float], list[float]]:
    """Slack of every layer with room for the rounding of its limit, and the limit's share of the sensitivity.

    A cap is enforced as it stands. A certified bound gets the room twice: the limit lies above the bound by as much
    as norms may round, so that where the certificate is true no record is ever scaled.
    """
    found = []
    for path, s in zip(engine.plan.layers, slack, strict=True):
        capped = engine.bounds.of("layer_cap", path) is not None or engine.bounds.of("joint_cap", path) is not None
        room = engine.plan.room(path)
        found.append((s * room if capped else s * room**2, 1 / (s * room)))
    return [s for s, _ in found], [share for _, share in found]


def product_of(engine: PrivacyEngine, module: nn.Module, path: str) -> Product:
    """How the products of one layer are formed."""
    return engine.bounds.product.resolve(module.get_submodule(path), engine.device)


def install(engine: PrivacyEngine) -> None:
    """Turn the layers private, put the doors on the model, and hook the optimiser."""
    assert engine.model is not None
    blocks, of = engine._release.blocks, engine.bounds.of
    places = {id(block.parameter): i for i, block in enumerate(blocks)}
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    engine._names = [names[id(block.parameter)] for block in blocks]
    engine._collector = Collector(engine._release.add, engine.bounds.caps_of(""), engine._drop_sum)
    engine._handles = []
    for path in engine.plan.layers:
        layer, cap, joint = engine.model.get_submodule(path), of("layer_cap", path), of("joint_cap", path)
        bound = joint is None and (cap is None or engine._release.knorm is not None)  # that one's norm is entrywise
        make_layer_private(
            layer, radius=of("layer_radius", path), cotangent=of("cotangent_radius", path),
            cap=math.inf if bound else cap, beta=of("bias_scale", path) or 1.0, product=engine.products[path],
            caps=engine.bounds.caps_of(path), bound=bound,
        )  # fmt: skip
        weight, bias = (places.get(id(getattr(layer, name, None))) for name in ("weight", "bias"))
        measure = engine.plan.measure(path, engine._release.knorm) if bound else None
        engine._collector.enter(Entry(layer, weight, bias, 1, joint, measure))
    engine._entrance = Entrance(engine._call, fixed=engine.plan.graph is not None)
    engine._gate = OutputGate(engine, engine.device, engine._entrance)
    engine._randomness = ForwardRandomness(engine.device, functools.partial(_forward_key, engine), engine._model_draws)
    before, after = engine._randomness.hooks()
    # ahead of the hooks that users have, which may draw too; moved only where it must be (torch 2.10 compiles no other)
    behind = bool(forward_hooks(engine.model))
    engine._handles = [engine.model.register_forward_pre_hook(before, prepend=behind)]
    projections = {"": math.inf, **engine.bounds.projections()}
    detach = engine.bounds.p != 2  # an l2 projection expands other norms unless its scale is a constant
    for path, radius in projections.items():
        part = engine.model.get_submodule(path)
        engine._handles.append(part.register_forward_pre_hook(InputProjection(radius, detach), with_kwargs=True))
    buffers = BufferGuard(engine.model)
    engine._handles.append(engine.model.register_forward_pre_hook(engine._entrance, with_kwargs=True))
    engine._handles.append(engine.model.register_forward_pre_hook(buffers.before))
    engine._handles.append(engine.model.register_forward_hook(buffers.after))
    engine._handles.append(engine.model.register_forward_hook(engine._gate))
    engine._handles.append(engine.model.register_forward_hook(after, always_call=True))
    engine._trained = set(places)
    for block in blocks:
        block.parameter.grad = None
        engine._handles.append(block.parameter.register_post_accumulate_grad_hook(engine._drop))
    engine._handles.append(engine.optimizer.register_step_pre_hook(engine._before_step))
    engine._handles.append(engine.optimizer.register_step_post_hook(engine._after_step))
    engine._amp_before = engine.optimizer.__dict__.get("_step_supports_amp_scaling")
    engine.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined] # so that a GradScaler reaches us


@dataclass(frozen=True)
class Tested:
    """What the test of independence has established for records of one public shape, in one choice of modes.

    Attributes:
        outputs: Which of the tensors that the model returns have a row for each record.
        folds: Of every layer, how many rows of a product may belong to one record (SOUNDNESS section 7, b).
        shape: Of one record of the first such output.
    """

    outputs: frozenset[int]
    folds: tuple[frozenset[int], ...]
    shape: tuple[int, ...] = ()


def test_records(engine: PrivacyEngine, signature: Signature, modes: tuple[bool, ...], size: int = 1) -> Tested | None:
    """One record must not change another's products, on random public records of this shape; None: it could not run.

    A plan without a graph learns from it which layers are used, how often, and on how much of a record.
    """
    model, call = engine.model, engine._entrance.call(signature)
    assert model is not None

    @contextlib.contextmanager
    def uncut(masks: int) -> Iterator[None]:  # the model's output with its graph behind it, and masks held fixed
        owner, engine._gate.engine = engine._gate.engine, None
        engine._randomness.next_batch(masks)
        try:
            yield
        finally:
            engine._gate.engine = owner

    again = engine._randomness.scope if engine._randomness.draws else contextlib.nullcontext
    probe, calls = Probe(model, engine._collector, uncut, again), engine._randomness.calls
    try:
        with in_modes(model, modes):
            refuse_mixing(model)
            facts = check_independence(probe, call, size)
    finally:
        engine._randomness.next_batch(calls)
    if facts is None:
        if engine.plan.graph is None:
            raise ContractError(
                "the model could not be run on random records, so that its independence cannot be tested: "
                f"{probe.failure}. Pass example= if its inputs are not found in a batch as they should be."
            ) from probe.failure
        return None
    if isinstance(engine.plan, OpenPlan):
        uses = [[use for _, use in facts.uses.get(i, [])] for i in range(len(engine._collector.entries))]
        if engine.plan.learn(dict(zip(engine.plan.layers, uses, strict=True))) and engine._tested:
            size_up(engine)
    folds = [frozenset(m for m, _ in facts.uses.get(i, [])) for i in range(len(engine._collector.entries))]
    outputs = [i for i, sketch in enumerate(facts.outputs) if sketch is not None]
    return Tested(frozenset(outputs), tuple(folds), facts.shapes[outputs[0]])


def refuse_unused(engine: PrivacyEngine) -> None:
    """A trainable layer that no pass uses would get nothing but noise."""
    unused = engine.plan.unused() if isinstance(engine.plan, OpenPlan) else []
    if unused and not engine._model_draws:  # a model that draws may have left the layer out by chance
        raise CertificationError(
            f"layer '{unused[0]}' is trainable but the model does not use it: it would get nothing but noise. "
            "Fix: freeze it (requires_grad_(False))."
        )


def output_shape(engine: PrivacyEngine, tested: Tested | None) -> tuple[int, ...]:
    """Of one record of the model's output."""
    graph = engine.plan.graph
    if graph is not None:
        return graph.nodes[graph.output].op.out_shape
    return () if tested is None else tested.shape


def size_up(engine: PrivacyEngine) -> None:
    """Room for rounding, and limits, from what is known of every layer's uses."""
    plan = engine.plan
    counts = [len(plan.uses(path)) for path in plan.layers]
    entries = engine._collector.entries
    if engine._quantiles is not None and counts != [entry.uses for entry in entries]:
        raise ContractError("layers are used a different number of times than before: adaptive limits refuse.")
    for entry, count in zip(entries, counts, strict=True):
        entry.uses = count
    physical = engine.loader.piece_size
    slack = sum_slack(plan, engine.products, engine.b_max, physical, engine.views)
    engine._release.slack, engine._shares = with_room(engine, slack)
    engine._constants.clear()
    if engine.bounds.adaptive is not None and engine._quantiles is None:
        _adapt(engine, engine.bounds.adaptive)
    moving = [e.joint is None and (bool(e.layer._wc_flags & BOUND) or engine._quantiles is None) for e in entries]
    engine._limits = Limits([entry.layer for entry in entries], moving, engine._shares)


def _forward_key(engine: PrivacyEngine, call: int) -> bytes:
    """The secret key of what the model draws in its ``call``-th pass over the present piece."""
    return engine.streams.key(FORWARD, engine.steps, -1 if engine._info is None else engine._info.piece, call)


def _adapt(engine: PrivacyEngine, settings: Adaptive) -> None:
    """Limits follow private quantiles; their queries take a part of the step's noise budget."""
    assert engine.model is not None
    layers = {path: (engine.model.get_submodule(path), len(engine.plan.uses(path))) for path in engine.plan.layers}
    engine._quantiles = engine.plan.quantiles = Quantiles(
        settings, layers, engine.views, engine.expected_batch_size, engine.noise_multiplier
    )
    engine._release.sigma = engine._quantiles.gradient_sigma


def uninstall(engine: PrivacyEngine) -> None:
    """Undo :func:`install`: hooks removed, layers native, weights as they are."""
    assert engine.model is not None
    for handle in engine._handles:
        handle.remove()
    engine._handles = []
    engine._drop_sum()
    engine._info = None
    for module in engine.model.modules():
        make_layer_plain(module)
        module.__dict__.pop("_wc_dft", None)
    if engine._amp_before is None:
        del engine.optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
    else:
        engine.optimizer._step_supports_amp_scaling = engine._amp_before  # type: ignore[attr-defined]
