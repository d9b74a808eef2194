"""The model as a graph of operators, each acting on one record at a time.

``torch.export`` with a symbolic record dimension gives the operators; the calls of layers and of modules with a rule of
their own are contracted to single nodes; every remaining operator must have a rule. Record independence is checked on
the way: every activation keeps the symbolic record dimension in front, and each rule refuses to act along it.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from weightclip._torch import AnyBatchNorm, forward_hooks
from weightclip.bounds import Edge, LayerRule, Op, Rule, layer_rule, module_rule, operator_rule
from weightclip.errors import CertificationError
from weightclip.factors import plain_forward

_aten = torch.ops.aten
# composite operators that may return their own input without saying so in their schema
_SILENT = {_aten.dropout, _aten.feature_dropout, _aten.type_as}
# arguments of these are shapes: the check that records stay on dimension 0 covers them
_TAKE_SIZES = {_aten.view, _aten.reshape, _aten._unsafe_view, _aten.expand, _aten.broadcast_to, _aten.unflatten}
_REFUSED = {
    AnyBatchNorm: "batch normalisation mixes records; use weightclip.nn.SafeGroupNorm",
    nn.MultiheadAttention: "nn.MultiheadAttention hides its layers; build attention from nn.Linear and "
    "torch.nn.functional.scaled_dot_product_attention",
    nn.RNNBase: "recurrent layers have no rule; unroll with nn.Linear",
    nn.EmbeddingBag: "EmbeddingBag has no in-product form; use nn.Embedding followed by a sum over positions",
}


@dataclass
class Node:
    """One operator with the nodes it reads from; exactly one of ``rule`` and ``layer`` is set, inputs have neither."""

    op: Op
    edges: tuple[int, ...]
    rule: Rule | None = None
    layer: LayerRule | None = None

    @property
    def is_input(self) -> bool:
        """Whether this is an input of the model."""
        return self.rule is None and self.layer is None


@dataclass
class Graph:
    """Nodes in topological order; the last one that reaches the loss is ``output``."""

    nodes: list[Node]
    output: int

    def layers(self) -> dict[str, list[int]]:
        """Module path -> nodes, for every layer with parameters, in order of first use."""
        found: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            if node.layer is not None:
                found.setdefault(node.op.path, []).append(index)
        return found


def trace(model: nn.Module, example: Any) -> Graph:
    """The graph of ``model`` on inputs shaped like ``example`` (a batch or a tuple of batches; only shapes matter)."""
    _refuse_modules(model)
    args = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    args = tuple(_two_records(a) for a in args)
    program = _export(model, args)
    return _Contraction(model, program).graph()


def _two_records(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        raise CertificationError("an input of the model has no record dimension: pass batches, records on dimension 0")
    return torch.zeros((2, *value.shape[1:]), dtype=value.dtype, device=value.device)


def _export(model: nn.Module, args: tuple[Any, ...]) -> torch.export.ExportedProgram:
    records = torch.export.Dim("records", min=2, max=2**31)
    shapes = tuple({0: records} if isinstance(a, Tensor) else None for a in args)
    varargs = any(q.kind is q.VAR_POSITIONAL for q in inspect.signature(model.forward).parameters.values())
    try:
        with plain_forward():
            return torch.export.export(model, args, dynamic_shapes=(shapes,) if varargs else shapes)
    except CertificationError:
        raise
    except Exception as error:  # torch.export raises many unrelated types
        text = str(error).strip().splitlines()
        raise CertificationError(
            "the model could not be turned into a graph (data-dependent control flow, a fixed batch size, or an "
            f"operator torch.export does not know): {text[0] if text else type(error).__name__}"
        ) from error


def _refuse_modules(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for kind, why in _REFUSED.items():
            if isinstance(module, kind):
                raise CertificationError(f"module '{path}' ({type(module).__name__}): {why}.")
        if module_rule(module) or layer_rule(module):
            _refuse_hooks(path, module)
        if hasattr(module, "parametrizations"):
            table = cast(Any, module.parametrizations)
            found = [type(step).__name__.lstrip("_") for steps in table.values() for step in steps]
            raise CertificationError(
                f"module '{path}' ({type(module).__name__}) is parametrised by {', '.join(found)}: clipping the "
                "original does not bound the effective weight. Fix: "
                "torch.nn.utils.parametrize.remove_parametrizations(module, "
                "name), and Bounds(weight_norm=...) or weightclip.nn.StandardizedConv2d instead."
            )


class _Contraction:
    """Walks the exported graph once, merging each call of a known module into one node."""

    def __init__(self, model: nn.Module, program: torch.export.ExportedProgram) -> None:
        self.model, self.program = model, program
        self.names = {module: path for path, module in model.named_modules()}  # one name per module, also if it has two
        signature = program.graph_signature
        self.parameters: dict[str, str] = dict(signature.inputs_to_parameters)
        kept = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        self.constants: dict[str, Tensor] = {name: _lookup(program, target) for name, target in kept.items()}
        self.user_inputs = set(signature.user_inputs)
        self.nodes: list[Node] = []
        self.index: dict[fx.Node, int] = {}  # activation -> node index
        self.batch: Any = None

    def graph(self) -> Graph:
        regions = self._regions()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                if node.name in self.user_inputs and isinstance(node.meta.get("val"), Tensor):
                    self._add_input(node)
            elif node.op == "call_function":
                region = regions.get(node)
                if not _has_tensor(node) or not node.users:  # sizes, assertions about metadata, results nobody reads
                    continue
                if region is not None:
                    region.visit(self, node)
                elif self._depends(node):
                    self._add_operator(node)
            elif node.op == "output":
                self._refuse_unseen_writes()
                return Graph(self.nodes, self._find_output(node))
        raise CertificationError("the model has no output.")

    def _regions(self) -> dict[fx.Node, _Region]:
        """Nodes that lie inside the call of a layer or of a module with a rule, by call."""
        found: dict[fx.Node, _Region] = {}
        calls: dict[str, _Region] = {}
        for node in self.program.graph.nodes:
            for key, (path, _kind) in (node.meta.get("nn_module_stack") or {}).items():
                if not _has_tensor(node):
                    continue
                if key not in calls:
                    module = self.model.get_submodule(path)
                    rule, layer = module_rule(module), layer_rule(module)
                    if rule is None and layer is None:
                        continue
                    calls[key] = _Region(self.names[module], module, rule, layer, set())
                calls[key].members.add(node)
                found[node] = calls[key]
                break  # the outermost call owns the node
        return found

    def _depends(self, node: fx.Node) -> bool:
        used = [n for n in node.all_input_nodes if n in self.index]
        trained = [self.parameters[n.name] for n in node.all_input_nodes if n.name in self.parameters]
        if trained and (used or any(self.model.get_parameter(t).requires_grad for t in trained)):
            raise CertificationError(
                f"parameter '{trained[0]}' is used by node '{node.name}' ({node.target}) outside a layer with a rule. "
                "Fix: use a layer weightclip knows (nn.Linear, nn.Conv*d, nn.Embedding, weightclip.nn.*), "
                "or freeze the parameter and register it as a buffer."
            )
        return bool(used)

    def _add_input(self, node: fx.Node) -> None:
        value = node.meta["val"]
        self.batch = value.shape[0]
        shape, floating = self._record_shape(node, value), value.dtype.is_floating_point
        self.nodes.append(Node(Op(node.name, "input", (), {}, (), shape, floating=floating), ()))
        self.index[node] = len(self.nodes) - 1

    def _record_shape(self, node: fx.Node, value: Any) -> tuple[int, ...]:
        if isinstance(value, (list, tuple)):
            return self._record_shape(node, value[0])
        if value.dim() == 0 or str(value.shape[0]) != str(self.batch):
            raise CertificationError(
                f"node '{node.name}' ({node.target}): its result does not keep records on dimension 0 (shape "
                f"{tuple(map(str, value.shape))}). Fix: act on each record alone, records in front."
            )
        if any(not isinstance(s, int) for s in value.shape[1:]):
            raise CertificationError(f"node '{node.name}': a dimension besides the records is not fixed.")
        return tuple(int(s) for s in value.shape[1:])

    def _add_operator(self, node: fx.Node) -> None:
        rule = operator_rule(node.target)
        kind = getattr(node.target, "__name__", str(node.target))
        kind = str(node.target) if node.target is not operator.getitem else kind
        if rule is None:
            raise CertificationError(
                f"node '{node.name}' ({kind}) has no rule. Fix: register one with weightclip.register_rule({kind}, "
                "...) or put the operation in a module and register a rule for its type."
            )
        edges: list[int] = []
        packet = getattr(node.target, "overloadpacket", None)

        def convert(value: Any) -> Any:
            if isinstance(value, fx.Node):
                if value in self.index:
                    edges.append(self.index[value])
                    return Edge(len(edges) - 1)
                if value.name in self.constants:
                    return self.constants[value.name]
                if isinstance(value.meta.get("val"), Tensor):
                    fix = "compute it once and keep it as a buffer"
                    raise self._no_rule(value, "computes a constant tensor inside forward", fix)
                size = value.meta.get("val", value)
                if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) and packet not in _TAKE_SIZES:
                    raise self._no_rule(node, "depends on the number of records in the batch", "use a constant")
                return size
            if isinstance(value, (list, tuple)):
                return type(value)(convert(v) for v in value)
            return value

        args = tuple(convert(a) for a in node.args)
        kwargs = {k: convert(v) for k, v in node.kwargs.items()}
        shapes = tuple(self.nodes[e].op.out_shape for e in edges)
        result = node.meta["val"]
        narrow = isinstance(result, Tensor) and (not result.dtype.is_floating_point or result.dtype.itemsize < 4)
        if narrow and any(self.nodes[e].op.floating for e in edges):
            fix = "keep activations in float32 and train under torch.autocast"
            raise self._no_rule(node, f"casts activations to {result.dtype}, which keeps no norm", fix)
        floating = not isinstance(result, Tensor) or result.dtype.is_floating_point
        op = Op(node.name, kind, args, kwargs, shapes, self._record_shape(node, result), floating=floating)
        rule(op, 2.0)  # refuses here, at the node, rather than later
        self.nodes.append(Node(op, tuple(edges), rule=rule))
        self.index[node] = len(self.nodes) - 1

    @staticmethod
    def _no_rule(node: fx.Node, what: str, fix: str) -> CertificationError:
        return CertificationError(f"node '{node.name}' ({node.target}) {what}. Fix: {fix}.")

    def _refuse_unseen_writes(self) -> None:
        """The walk follows values, not memory: after ``y[:, 0].mul_(9)`` it would take ``y`` for what it was before.

        Which promise needs it: that a certificate is true, so that its limits never act. No limit rests on it.
        """
        nodes = list(self.program.graph.nodes)
        order = {node: i for i, node in enumerate(nodes)}
        base: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            base[node] = base[node.all_input_nodes[0]] if _shares_memory(node) else node
        for node in nodes:
            for written in _written(node):
                if base[written].op == "placeholder" and base[written].name not in self.user_inputs:
                    name = base[written].target
                    raise self._no_rule(node, f"changes the model's own '{name}' in forward", "keep it constant there")
                others = [n for n in nodes if base[n] is base[written] and order[n] < order[node]]
                if any(order[user] > order[node] for n in others for user in n.users):
                    raise self._no_rule(node, "writes in place into what is read later", "return a new tensor")

    def _find_output(self, node: fx.Node) -> int:
        outputs = [n for n in node.args[0] if isinstance(n, fx.Node) and n in self.index]  # type: ignore[union-attr]
        if len(outputs) != 1 or len(node.args[0]) != 1:  # type: ignore[arg-type]
            raise CertificationError("the model must return one tensor that depends on its input.")
        return self.index[outputs[0]]


@dataclass
class _Region:
    """The nodes of one call of a module that becomes a single node."""

    path: str
    module: nn.Module
    rule: Rule | None
    layer: LayerRule | None
    members: set[fx.Node]

    def visit(self, walk: _Contraction, node: fx.Node) -> None:
        """Add the contracted node when ``node`` is the one whose value leaves the region."""
        if all(user in self.members for user in node.users):
            return
        if not any(n in walk.index or n in self.members for n in node.all_input_nodes):
            return
        sources: list[fx.Node] = []
        for member in walk.program.graph.nodes:
            if member in self.members:
                sources += [n for n in member.all_input_nodes if n in walk.index and n not in self.members]
        unique = list(dict.fromkeys(sources))
        edges = tuple(walk.index[n] for n in unique)
        shape = walk._record_shape(node, node.meta["val"])
        shapes = tuple(walk.nodes[e].op.out_shape for e in edges)
        kind = type(self.module).__name__
        args = tuple(Edge(i) for i in range(len(edges)))
        op = Op(self.path, kind, args, {}, shapes, shape, self.module, self.path)
        if self.layer is not None:
            if len(edges) != 1:
                raise op.refuse("a layer with parameters must have one input", "call it on one tensor")
            self.layer.check(self.module, op)
        elif any(q.requires_grad for q in self.module.parameters()):
            raise op.refuse("a module with a rule of its own holds trainable parameters", "freeze them")
        else:
            assert self.rule is not None
            self.rule(op, 2.0)
        walk.nodes.append(Node(op, edges, rule=self.rule if self.layer is None else None, layer=self.layer))
        walk.index[node] = len(walk.nodes) - 1


def _shares_memory(node: fx.Node) -> bool:
    """Whether this node's value may be its first input under another name."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None:
        return True  # operator.getitem
    return any(r.alias_info is not None for r in schema.returns) or node.target.overloadpacket in _SILENT  # type: ignore


def _written(node: fx.Node) -> list[fx.Node]:
    schema: Any = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    values = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs
    found = [values.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [v for w in found for v in (w if isinstance(w, (list, tuple)) else [w]) if isinstance(v, fx.Node)]


def _has_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (Tensor, list, tuple))


def _refuse_hooks(path: str, module: nn.Module) -> None:
    for hook in forward_hooks(module):
        name = {"WeightNorm": "weight_norm", "SpectralNorm": "spectral_norm"}.get(type(hook).__name__)
        if name is not None:
            raise CertificationError(
                f"module '{path}' recomputes its weight by torch.nn.utils.{name}: clipping the original does not "
                f"bound the effective weight. Fix: torch.nn.utils.remove_{name}(module), and "
                "Bounds(weight_norm=...) instead."
            )
        if not getattr(hook, "_weightclip", False):
            raise CertificationError(
                f"module '{path}' has a forward hook, which the certificate cannot see. Fix: remove the hook."
            )


def _lookup(program: torch.export.ExportedProgram, target: str) -> Tensor:
    for table in (program.state_dict, program.constants):
        if target in table and isinstance(table[target], Tensor):
            return cast(Tensor, table[target])
    raise CertificationError(f"buffer '{target}' of the model was not found.")
