"""What an exported graph does not show, refused before the graph is believed.

``torch.export`` records forward operators. Custom backward formulas, hooks on gradients, writes through a view and
sizes of the batch all change per-record gradients without changing that record: each would make a certificate false.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from weightclip._torch import backward_hooks, checked_functions, gradient_hooks
from weightclip.bounds import layer_rule, module_rule
from weightclip.errors import CertificationError

aten = torch.ops.aten

# composite operators that may return their own input without saying so in their schema
_SILENT_ALIASES = {aten.dropout, aten.feature_dropout, aten.type_as}
# arguments of these are shapes: the check that records stay on dimension 0 covers them
_TAKE_SIZES = {aten.view, aten.reshape, aten._unsafe_view, aten.expand, aten.broadcast_to, aten.unflatten}


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Backward hooks of modules and parameters change gradients behind the certificate's back."""
    for path, module in model.named_modules():
        if backward_hooks(module):
            raise CertificationError(
                f"module '{path}' has a backward hook, which the certificate cannot see. Fix: remove the hook."
            )
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter):
            raise CertificationError(
                f"parameter '{name}' has a gradient hook, which the certificate cannot see. Fix: remove the hook."
            )


@contextlib.contextmanager
def refuse_hidden_gradients() -> Iterator[None]:
    """While a model is traced: no custom ``autograd.Function`` and no tensor hook outside modules with a rule."""
    register = Tensor.register_hook

    def check(cls: type) -> None:
        if not _vouched_for(sys._getframe(1)):
            raise CertificationError(
                f"autograd.Function '{cls.__name__}' has a backward formula of its own, which the graph does not show. "
                "Fix: put it in a module and register a rule for the module's type with weightclip.register_rule."
            )

    def checked_register(self: Tensor, hook: Any) -> Any:
        if not _vouched_for(sys._getframe(1)):
            raise CertificationError(
                "forward() registers a hook on an activation's gradient, which the graph does not show. "
                "Fix: remove the hook, or put it in a module and register a rule for the module's type."
            )
        return register(self, hook)

    Tensor.register_hook = checked_register  # type: ignore[method-assign]
    try:
        with checked_functions(check):
            yield
    finally:
        Tensor.register_hook = register  # type: ignore[method-assign]


def _vouched_for(frame: FrameType | None) -> bool:
    """Whether a frame lies inside the forward of a module with a rule, whose author answers for its gradient."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and (module_rule(owner) or layer_rule(owner)):
            return True
        frame = frame.f_back
    return False


def refuse_unseen_writes(program: torch.export.ExportedProgram) -> None:
    """In-place operators must not change a value that is read later under another name, nor a buffer or parameter.

    The walk over the graph follows values, not memory: after ``y[:, 0].mul_(9)`` it would still take ``y`` for what it
    was before.
    """
    graph, signature = program.graph, program.graph_signature
    inputs = set(signature.user_inputs)
    order = {node: i for i, node in enumerate(graph.nodes)}
    base: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _alias_of(node)
        base[node] = node if source is None else base[source]
    for node in graph.nodes:
        for written in _written(node):
            if base[written].op == "placeholder" and base[written].name not in inputs:
                raise CertificationError(
                    f"node '{node.name}' ({node.target}) changes the model's own '{base[written].target}' in forward. "
                    "Fix: keep buffers and parameters constant during a pass."
                )
            for other in graph.nodes:
                stale = base[other] is base[written] and order[other] < order[node]
                if stale and any(order[user] > order[node] for user in other.users):
                    raise CertificationError(
                        f"node '{node.name}' ({node.target}) writes in place into '{other.name}', which is read later. "
                        "Fix: use the operator that returns a new tensor."
                    )


def _alias_of(node: fx.Node) -> fx.Node | None:
    """The input whose memory this node's value may share."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.all_input_nodes[0]  # operator.getitem
    shared = any(r.alias_info is not None for r in schema.returns)
    return node.all_input_nodes[0] if shared or node.target.overloadpacket in _SILENT_ALIASES else None  # type: ignore


def _written(node: fx.Node) -> list[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    values = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs
    written = [values.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    flat = [v for w in written for v in (w if isinstance(w, (list, tuple)) else [w])]
    return [v for v in flat if isinstance(v, fx.Node)]


def refuse_batch_size(node: fx.Node, value: Any) -> None:
    """A size that depends on the number of records may shape a tensor, never enter its values."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in _TAKE_SIZES:
            raise CertificationError(
                f"node '{node.name}' ({node.target}): its result depends on the number of records in the batch. "
                "Fix: act on each record alone; use a constant in place of the batch size."
            )


def refuse_cast(node: fx.Node, value: Any, from_floating: bool) -> None:
    """Floating-point activations stay float32 or better: casts to integers or half precision have no rule."""
    if not from_floating or not isinstance(value, Tensor):
        return
    if not value.dtype.is_floating_point:
        raise CertificationError(
            f"node '{node.name}' ({node.target}): it turns activations into {value.dtype}, which keeps no norm. "
            "Fix: keep activations floating-point."
        )
    if value.dtype.itemsize < 4:
        raise CertificationError(
            f"node '{node.name}' ({node.target}): it casts activations to {value.dtype} inside the model. "
            "Fix: keep float32 in the model and train under torch.autocast."
        )
