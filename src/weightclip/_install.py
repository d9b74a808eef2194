"""Putting an engine on a model and taking it off again: private layers, doors, hooks, and the test of independence."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from weightclip._adaptive import Adaptive, Quantiles
from weightclip._gate import InputProjection, OutputGate, ShapeGuard
from weightclip._independence import Probe, check_independence
from weightclip._randomness import FORWARD, ForwardRandomness
from weightclip._torch import forward_hooks
from weightclip._watch import BufferGuard
from weightclip.factors import Collector, Entry, Limits, Product, make_layer_plain, make_layer_private

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
    limited: list[bool] = []
    for path, uses in engine.plan.layers.items():
        layer, cap, joint = engine.model.get_submodule(path), of("layer_cap", path), of("joint_cap", path)
        bound = joint is None and (cap is None or engine._release.knorm is not None)  # that one's norm is entrywise
        make_layer_private(
            layer, radius=of("layer_radius", path), cotangent=of("cotangent_radius", path),
            cap=math.inf if bound else cap, beta=of("bias_scale", path) or 1.0, product=engine.products[path],
            caps=engine.bounds.caps_of(path), bound=bound,
        )  # fmt: skip
        weight, bias = (places.get(id(getattr(layer, name, None))) for name in ("weight", "bias"))
        measure = engine.plan.measure(path, engine._release.knorm) if bound else None
        engine._collector.enter(Entry(layer, weight, bias, len(uses), joint, measure))
        limited.append(joint is None and (bound or engine.bounds.adaptive is None))
    engine._limits = Limits([entry.layer for entry in engine._collector.entries], limited, engine._shares)
    if engine.bounds.adaptive is not None:
        _adapt(engine, engine.bounds.adaptive)
    engine._gate = OutputGate(engine, engine.device)
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
    guard, buffers = ShapeGuard(engine.plan.graph.input_shapes, engine._example), BufferGuard(engine.model)
    engine._handles.append(engine.model.register_forward_pre_hook(guard, with_kwargs=True))
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


def test_independence(engine: PrivacyEngine, size: int) -> None:
    """One record must not change another's products, on random public records, before anything is trained."""
    assert engine.model is not None

    @contextlib.contextmanager
    def uncut(masks: int) -> Iterator[None]:  # the model's output with its graph behind it, and masks held fixed
        owner, engine._gate.engine = engine._gate.engine, None
        engine._randomness.next_batch(masks)
        try:
            yield
        finally:
            engine._gate.engine = owner

    again = engine._randomness.scope if engine._randomness.draws else contextlib.nullcontext
    engine._independence = check_independence(
        Probe(engine.model, engine._collector, uncut, again), engine._example, size
    )


def _forward_key(engine: PrivacyEngine, call: int) -> bytes:
    """The secret key of what the model draws in its ``call``-th pass over the present piece."""
    return engine.streams.key(FORWARD, engine.steps, -1 if engine._info is None else engine._info.piece, call)


def _adapt(engine: PrivacyEngine, settings: Adaptive) -> None:
    """Limits follow private quantiles; their queries take a part of the step's noise budget."""
    assert engine.model is not None
    layers = {path: (engine.model.get_submodule(path), len(uses)) for path, uses in engine.plan.layers.items()}
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
