"""The plan: norms forward, Lipschitz constants backward, one sensitivity per layer (SOUNDNESS Theorem 5)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.bounds import Numerics, Scalar, least, plus, times
from weightclip.certificate._bounds import Bounds
from weightclip.certificate._graph import Graph, trace
from weightclip.certificate._open import AnyPlan, Certificate, Evaluation, LayerUse, enforced_to, unbounded
from weightclip.errors import CertificationError
from weightclip.factors import Measure
from weightclip.losses import Loss, recognise

_U = 2.0**-24
_ENFORCED = ("layer_cap", "joint_cap", "layer_radius", "cotangent_radius")  # limits on a layer's factors or gradient


class Plan(AnyPlan):
    """The model's graph with the bounds laid on it; evaluated anew whenever weights change.

    ``loss_bound`` bounds each record's gradient at the model's output, in the dual exponent of ``bounds.p``.
    """

    def __init__(self, model: nn.Module, graph: Graph, bounds: Bounds, loss_bound: float) -> None:
        self.model, self.graph, self.bounds, self.loss_bound = model, graph, bounds, loss_bound
        refuse_shared(model)
        uses_of = graph.layers()
        own = {path: list(model.get_submodule(path).parameters(recurse=False)) for path in uses_of}
        self.layers = {path: uses for path, uses in uses_of.items() if any(q.requires_grad for q in own[path])}
        reached = {id(q) for path in self.layers for q in own[path]}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in reached:
                raise CertificationError(
                    f"parameter '{name}' is trainable but no certified layer uses it. Fix: freeze it "
                    "(requires_grad_(False)) or use it through a layer weightclip knows."
                )
        if not self.layers:
            raise CertificationError("the model has no trainable parameters: nothing to make private.")
        for path, uses in self.layers.items():
            rule, module = graph.nodes[uses[0]].layer, model.get_submodule(path)
            asked = [name for name in _ENFORCED if bounds.of(name, path) is not None]
            if asked and rule is not None and not rule.in_product:
                raise CertificationError(
                    f"layer '{path}' ({type(module).__name__}) has no in-product form, which {asked[0]} needs. "
                    f"Fix: leave it out of Bounds.{asked[0]} (a mapping by name), or use a torch layer."
                )
        self.loss_shape = graph.nodes[graph.output].op.out_shape  # of the loss's argument, one record
        self._checked = False
        projections = bounds.projections()
        at_input = projections.get("", math.inf)
        self._entries = {i: _projected(at_input, n.op.out_shape) for i, n in enumerate(graph.nodes) if n.is_input}
        self._radii = {  # of the projections in front of modules, for each of their inputs
            i: [_projected(projections[node.op.path], shape) for shape in node.op.shapes]
            for i, node in enumerate(graph.nodes) if node.op.path and node.op.path in projections
        }  # fmt: skip
        # gains are taken at a layer's first use, and norms grow with the input
        self._like_first = {
            i for uses in uses_of.values() for i in uses
            if graph.nodes[i].op.shapes == graph.nodes[uses[0]].op.shapes
        }  # fmt: skip
        ops = {i: graph.nodes[i].op for uses in self.layers.values() for i in uses}
        self._uses = {i: LayerUse(tuple(o.shapes[0]), tuple(o.out_shape)) for i, o in ops.items()}
        self._enforced = {i: enforced_to(use) for i, use in self._uses.items()}
        self._static = {}
        for i, node in enumerate(graph.nodes):
            if node.rule is not None:
                forward = node.rule(node.op, 2.0)
                self._static[i] = (node.rule(node.op, bounds.p) if bounds.p != 2 else forward, forward)

    def holders(self, path: str) -> list[nn.Module]:
        """The modules that hold the parameters of a layer."""
        return [self.model.get_submodule(path)]

    @functools.cached_property
    def needs_gains(self) -> bool:
        """Whether weight norms matter: not when weights are free and all factors are bounded by themselves."""
        b = self.bounds
        if b.weight_norm is not None or b.p != 2:
            return True

        def bounded(path: str) -> bool:
            cap, joint, x, cotangent = (b.of(name, path) is not None for name in _ENFORCED)
            return cap or joint or (x and cotangent)

        return not all(map(bounded, self.layers))

    def uses(self, path: str) -> list[LayerUse]:
        return [self._uses[i] for i in self.layers[path]]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All layers with a gain, frozen ones included."""
        for node in self.graph.nodes:
            if node.layer is not None and node.op.module is not None:
                yield node.op.path, node.op.module

    def dimension(self, path: str) -> int:
        layer = self.graph.nodes[self.layers[path][0]].layer
        assert layer is not None
        return layer.dimension(self.model.get_submodule(path))

    def measure(self, path: str, knorm: Any) -> Measure | None:
        """The norm of a layer's certified bound where it is not the product of l2 norms of its factors."""
        if knorm is not None:
            return Measure(knorm.p, math.sqrt(self.dimension(path)) if knorm.p == 1 else 1.0)
        return Measure() if math.isinf(self.bounds.p) else None

    def evaluate(self, numerics: Numerics, known: Mapping[str, Scalar] | None = None) -> dict[str, Evaluation]:
        """Bounds of every trainable layer at the present weights.

        Args:
            numerics: How the passes round.
            known: Certified l2 gains by path that need not be recomputed (weights unchanged since, or drift added).
        """
        gains, outputs = self.forward(numerics, known or {})
        cotangents = self.backward(gains)
        found = {path: self._layer(path, uses, gains, outputs, cotangents) for path, uses in self.layers.items()}
        if not self._checked:  # which bounds exist does not change with the weights
            self._refuse_overflow(outputs)
            self._checked = True
        return found

    def forward(self, numerics: Numerics, known: Mapping[str, Scalar]):
        """Per node: the gain of each edge (chain exponent), and an l2 bound of its output, as enforced."""
        nodes, p = self.graph.nodes, self.bounds.p
        half = 1.0 if numerics.weights.itemsize >= 4 else 1 + numerics.operand  # activations and cotangents round too
        gains: list[tuple[Scalar, ...]] = []
        outputs: list[Scalar] = []
        for i, node in enumerate(nodes):
            if not node.op.floating:  # integers are not projected and not measured
                outputs.append(math.inf)
                gains.append((0.0,) * len(node.edges))
                continue
            if node.is_input:
                outputs.append(self._entries[i])
                gains.append(())
                continue
            inputs = self.inputs(i, outputs)
            if node.rule is not None:
                chain, forward = self._static[i]
                gains.append(chain.gains if half == 1 else tuple(times(g, half) for g in chain.gains))
                outputs.append(times(forward.output(inputs), half))
                continue
            assert node.layer is not None and node.op.module is not None
            module = node.op.module
            at_hand = self._at_hand(i, known)
            c2 = _host(node.layer.gain(module, node.op, 2, numerics) if at_hand is None else at_hand)
            if unbounded(c2):  # not wanted: every layer's factors are bounded
                gains.append((c2,))
                outputs.append(c2)
                continue
            chained = c2 if p == 2 else _host(node.layer.gain(module, node.op, p, numerics))
            gains.append((chained,))
            outputs.append(times(_host(node.layer.output(module, node.op, c2, inputs[0])), half))
        return gains, outputs

    def _at_hand(self, index: int, known: Mapping[str, Scalar]) -> Scalar | None:
        """A gain that need not be recomputed."""
        found = known.get(self.graph.nodes[index].op.path)
        return found if index in self._like_first or (found is not None and unbounded(found)) else None

    def inputs(self, index: int, outputs: list[Scalar]) -> list[Scalar]:
        """l2 bounds of a node's inputs, after the projection its module may have.

        That projection has gain 1 in the chain: for p = 1 and inf its scale is detached (``InputProjection``).
        """
        edges, radii = self.graph.nodes[index].edges, self._radii.get(index)
        if radii is None:
            return [outputs[e] for e in edges]
        return [least(outputs[e], radius) for e, radius in zip(edges, radii, strict=True)]

    def _refuse_overflow(self, outputs: list[Scalar]) -> None:
        """Behind a value without a bound, activations may overflow to NaN although their own bound is finite.

        Layers with an enforced factor drop such records; a layer without one would add NaN to the sum.
        """
        nodes = self.graph.nodes
        source: list[int | None] = []
        for i, node in enumerate(nodes):
            floating = [e for e in node.edges if nodes[e].op.floating]
            behind = [source[e] for e in floating if source[e] is not None]
            source.append(behind[0] if behind else (i if any(unbounded(outputs[e]) for e in floating) else None))
        first = source[self.graph.output]
        if first is None:
            return
        for path in self.layers:
            if all(self.bounds.of(name, path) is None for name in _ENFORCED):
                op = nodes[first].op
                raise CertificationError(
                    f"layer '{path}': the input of node '{op.name}' ({op.kind}) has no bound, so a record may overflow "
                    "there and its gradient would not be finite. "
                    f"Fix: set input_radius, or cotangent_radius for '{path}'."
                )

    def backward(self, gains: list[tuple[Scalar, ...]]) -> list[Scalar]:
        """L at each node: the sum over its outgoing edges of L_u c_edge (edges, not users)."""
        bound: list[Scalar] = [0.0] * len(self.graph.nodes)
        bound[self.graph.output] = self.loss_bound
        for i in reversed(range(len(self.graph.nodes))):
            for edge, gain in zip(self.graph.nodes[i].edges, gains[i], strict=True):
                bound[edge] = plus(bound[edge], times(bound[i], gain))
        return bound

    def _layer(self, path: str, uses: list[int], gains, outputs, cotangents) -> Evaluation:
        p, bounds = self.bounds.p, self.bounds
        radius, cotangent = self.limit("layer_radius", path), self.limit("cotangent_radius", path)
        cap, beta = self.limit("layer_cap", path), bounds.of("bias_scale", path) or 1.0
        joint = bounds.of("joint_cap", path)
        total: Scalar = 0.0
        x_bound: Scalar = 0.0
        l_bound: Scalar = 0.0
        for i in uses:
            node = self.graph.nodes[i]
            assert node.layer is not None and node.op.module is not None
            x = self.inputs(i, outputs)[0]
            module, op = node.op.module, node.op
            a2 = node.layer.factor(module, op, x, beta, 2)
            ap = a2 if p == 2 else node.layer.factor(module, op, x, beta, p)
            enforced = self._enforced[i]
            if radius is not None:
                a2 = least(a2, radius * enforced)
                ap = least(ap, radius * enforced * (math.sqrt(math.prod(op.out_shape)) if p == 1 else 1.0))
                x = least(x, radius)
            options = [times(cotangents[i], ap)]
            if cotangent is not None:
                options.append(times(cotangent * enforced, a2))
            if joint is not None:  # uses of one layer are summed before the cap, so it stands for all of them
                options = [joint / len(uses)]
            delta = least(*options) if len(options) > 1 else options[0]
            if cap is None and unbounded(delta):
                raise CertificationError(self._why_infinite(path, i, outputs, cotangents, gains))
            total = plus(total, delta)
            x_bound = _greatest(x_bound, x)
            l_bound = _greatest(l_bound, cotangents[i] if cotangent is None else least(cotangents[i], cotangent))
        if cap is not None:  # stands for all uses together; one that moves by quantiles is what is enforced
            total = cap if self.quantiles is not None else least(total, cap)
        return Evaluation(gains[uses[0]][0], x_bound, l_bound, total)

    def _why_infinite(self, path: str, index: int, outputs, cotangents, gains) -> str:
        """Name the node that has no finite bound, and the ways out."""
        nodes = self.graph.nodes
        radius = f"set Bounds.layer_radius for '{path}'"
        layer, op, x = nodes[index].layer, nodes[index].op, outputs[nodes[index].edges[0]]
        assert layer is not None and op.module is not None
        needed = self.bounds.of("layer_radius", path) is None  # an embedding's factor needs no bound of its input
        factor = layer.factor(op.module, op, x, 1.0, 2) if needed else 0.0
        if unbounded(factor) and unbounded(x):
            before = index
            while infinite := [e for e in nodes[before].edges if unbounded(outputs[e])]:
                before = infinite[0]
            op = nodes[before].op
            if nodes[before].edges:
                why, fix = f"node '{op.name}' ({op.kind}) has none", "put weightclip.nn.Project after that node"
            elif op.floating:
                why, fix = f"the model's input '{op.name}' has no radius", "set input_radius"
            else:
                why, fix = f"the model's input '{op.name}' holds integers, which are not projected", "pass floats"
            return f"layer '{path}': its input has no bound, because {why}. Fix: {fix}, or {radius}."
        for i in range(index + 1, len(nodes)):
            if any(unbounded(g) for g in gains[i]):
                op = nodes[i].op
                return (f"layer '{path}': the gradient that reaches it has no bound, because node '{op.name}' "
                        f"({op.kind}) has no finite gain. Fix: set Bounds.cotangent_radius for '{path}'.")  # fmt: skip
        return f"layer '{path}' has no finite sensitivity. Fix: set layer_radius and cotangent_radius for it."


def _projected(radius: float, shape: tuple[int, ...]) -> float:
    """What float32 leaves of a projection on a ball."""
    return radius * (1 + (math.prod(shape) + 8) * _U)


def _host(value: Scalar) -> Scalar:
    """A tensor on the CPU as a number: the rest of the chain then is plain arithmetic. On a device nothing waits."""
    return float(value) if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _greatest(a: Scalar, b: Scalar) -> Scalar:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if unbounded(a) or unbounded(b):
            return math.inf
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return torch.maximum(a, b)
        return a.clamp(min=b) if isinstance(a, Tensor) else b.clamp(min=a)  # type: ignore[union-attr,return-value]
    return max(a, b)


def refuse_shared(model: nn.Module) -> None:
    owner: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and owner.setdefault(id(parameter), path) != path:
                raise CertificationError(
                    f"parameter '{name}' is shared by modules '{owner[id(parameter)]}' and '{path}'. "
                    "Fix: use the same module twice instead."
                )


def build_plan(model: nn.Module, loss: Loss, bounds: Bounds, example: Any) -> Plan:
    """Trace the model on shapes like ``example`` and lay the bounds on its graph."""
    bounds.check_names(model)
    graph = trace(model, example)
    loss_bound = loss.bound(graph.nodes[graph.output].op.out_shape, bounds.p)
    return Plan(model, graph, bounds, loss_bound)


KNOWN: list[Callable[[nn.Module], Certificate | None]] = []
"""Who can tell the certificate of a model that was made private: the engine adds itself."""


def certify(
    model: nn.Module,
    loss: Any,
    input_radius: float | None = None,
    example: Any = None,
    *,
    bounds: Bounds | None = None,
    numerics: Numerics | None = None,
) -> Certificate:
    """Certify a model: a row per layer with its gain, bounds and sensitivity.

    Args:
        model: The model. A model made private is certified under its engine's bounds.
        loss: A torch loss, a loss of :mod:`weightclip.losses`, or the criterion the engine returned.
        input_radius: Public l2 radius of each record's input (short for ``bounds=Bounds(input_radius=...)``).
        example: A batch of inputs (or a tuple of them); only its shapes are read.
        bounds: What is enforced besides.
        numerics: How the passes round; float32 by default.

    Formal guarantees:
        See :class:`Certificate`. Adjacency: adding or removing one record.

    Example:
        >>> import torch, weightclip as wc
        >>> model = torch.nn.Linear(3, 2)
        >>> certificate = wc.certify(model, torch.nn.CrossEntropyLoss(), input_radius=1.0, example=torch.zeros(1, 3))
        >>> round(certificate.sensitivities[""], 3)  # sqrt(2) * sqrt(1 + 1)
        2.0
    """
    for known in KNOWN if bounds is None else ():
        if (found := known(model)) is not None:
            return found
    if example is None:
        raise CertificationError("certify needs example=: a batch of inputs, of which only the shapes are read.")
    bounds = bounds or Bounds()
    if input_radius is not None:
        bounds = replace(bounds, input_radius=input_radius)
    plan = build_plan(model, recognise(loss), bounds, example)
    return plan.certificate(plan.evaluate(numerics or Numerics()))
