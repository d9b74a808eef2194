"""What all plans share, a certificate as numbers, and plans without a graph.

In those every trainable layer has a limit of its own making, so nothing need be known between them.
SOUNDNESS section 7: with caps, or radii on both factors, on every trainable layer, the sensitivity of a layer is its
limit. Which layers are used, how often and on how much of a record is what the test of independence has seen.
"""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from weightclip.bounds import Numerics, Scalar, least, times
from weightclip.certificate._bounds import Bounds, MovingLimits
from weightclip.errors import CertificationError
from weightclip.factors import families, trained

_U = 2.0**-24


@dataclass
class Evaluation:
    """Bounds of one layer as numbers or 0-dim tensors, so that nothing waits for the device."""

    gain: Scalar
    x: Scalar
    cotangent: Scalar
    sensitivity: Scalar


@dataclass(frozen=True)
class LayerUse:
    """One use of a layer: shapes of one record's input and output there."""

    inside: tuple[int, ...]
    outside: tuple[int, ...]

    @property
    def size(self) -> int:
        """Entries of both factors."""
        return math.prod(self.inside) + math.prod(self.outside)


def unbounded(value: Scalar) -> bool:
    """Whether it is infinite; a tensor counts as finite, so that nothing waits for the device."""
    return isinstance(value, float) and math.isinf(value)


def enforced_to(use: LayerUse) -> float:
    """What float32 norms and scales leave of a limit that is enforced on one use."""
    return 1 + (use.size + 64) * _U


def room_of(uses: list[LayerUse], layers: int) -> float:
    """The same for a limit over all uses of a layer, of so many layers."""
    return max(map(enforced_to, uses)) + (4 * len(uses) + layers) * _U


@dataclass(frozen=True)
class Row:
    """One layer with trainable parameters. Bounds hold for every record, at the present weights."""

    name: str
    kind: str
    gain: float
    input_bound: float
    cotangent_bound: float
    sensitivity: float
    parameters: int


@dataclass(frozen=True)
class Certificate:
    """Sensitivities of the loss summed over records, before the division by the expected batch size.

    Formal guarantees:
        For every record (input within the enforced radii, any label), the l2 norm of its gradient of layer k, as the
        engine forms it, is at most ``sensitivities[k]``: adding or removing one record moves the layer's summed
        gradient by no more. Public inputs: the weights, the bounds, the shapes, the loss.
    """

    rows: tuple[Row, ...]
    loss_bound: float
    p: float
    joint: tuple[str, ...] = ()  # layers under one cap together

    @property
    def sensitivities(self) -> dict[str, float]:
        """Module path -> Delta_k (weight and bias together)."""
        return {row.name: row.sensitivity for row in self.rows}

    @property
    def joint_sensitivity(self) -> float:
        """Of all layers together: those under the joint cap move by no more than the largest of them does alone."""
        capped = max((r.sensitivity for r in self.rows if r.name in self.joint), default=0.0)
        return math.hypot(capped, *(r.sensitivity for r in self.rows if r.name not in self.joint))

    def __str__(self) -> str:
        head = ("layer", "type", "gain", "input", "cotangent", "sensitivity", "parameters")
        cells = [
            (r.name or "(model)", r.kind, *(_shown(v) for v in (r.gain, r.input_bound, r.cotangent_bound)),
             f"{r.sensitivity:.4g}", f"{r.parameters:,}")
            for r in self.rows
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
                 for r in [head, *cells]]  # fmt: skip
        last = f"joint sensitivity {self.joint_sensitivity:.4g}" + " (a cap)" * bool(self.joint)
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], last])

    def to_json(self) -> str:
        """The certificate as JSON."""
        return json.dumps({"p": self.p, "loss_bound": self.loss_bound, "layers": [asdict(r) for r in self.rows]})


def _shown(bound: float) -> str:
    return f"{bound:.4g}" if math.isfinite(bound) else "-"  # none is needed


class AnyPlan(ABC):
    """What plans with and without a graph have in common: limits that may move, and the certificate as a table."""

    model: nn.Module
    bounds: Bounds
    layers: dict[str, Any]  # what is known of the uses of each trainable layer
    loss_bound: float
    quantiles: MovingLimits | None = None  # where limits follow private quantiles

    @abstractmethod
    def uses(self, path: str) -> list[LayerUse]:
        """The uses of a trainable layer."""

    @abstractmethod
    def dimension(self, path: str) -> int:
        """Entries of a layer's trainable parameters."""

    def limit(self, name: str, path: str) -> Scalar | None:
        """The limit ``name`` of a layer as it stands: the public constant, or what quantiles have made of it."""
        adapted = None if self.quantiles is None else self.quantiles.limit(name, path)
        return self.bounds.of(name, path) if adapted is None else adapted

    def room(self, path: str) -> float:
        """What float32 may do to norms and scales of a layer's products: its limit is enforced up to this factor."""
        return room_of(self.uses(path), len(self.layers))

    def certificate(self, evaluations: dict[str, Evaluation]) -> Certificate:
        """The evaluation as numbers."""
        rows = []
        for path, e in evaluations.items():
            module = self.model.get_submodule(path)
            kind = getattr(type(module), "_wc_native", type(module)).__name__
            rows.append(Row(path, kind, float(e.gain), float(e.x), float(e.cotangent), float(e.sensitivity),
                            self.dimension(path)))  # fmt: skip
        joint = tuple(path for path in evaluations if self.bounds.of("joint_cap", path) is not None)
        return Certificate(tuple(rows), self.loss_bound, float(self.bounds.p), joint)


class OpenPlan(AnyPlan):
    """The trainable layers of a model and the limits on them: bounds for which :meth:`weightclip.Bounds.is_open`.

    Formal guarantees:
        ``evaluate`` returns for each layer the norm to which the collector limits one record's gradient, with room for
        the rounding of norms and scales at the sizes that were seen.
    """

    graph = None  # none is traced
    needs_gains = False  # no weight enters a limit

    def __init__(self, model: nn.Module, bounds: Bounds) -> None:
        bounds.check_names(model)
        self.model, self.bounds = model, bounds
        self._families = families(model)  # modules that share a parameter are one layer
        self.layers: dict[str, list[LayerUse]] = {path: [] for path in self._families}
        if not self.layers:
            raise CertificationError("the model has no trainable parameters: nothing to make private.")
        self.loss_bound = math.inf
        self.loss_shape: tuple[int, ...] = ()

    def learn(self, seen: Mapping[str, list[LayerUse]]) -> bool:
        """Take in what a pass used of each layer; whether more than any pass before it.

        Uses and sizes only ever grow, so that a sensitivity covers every pass since the last release.
        """
        before = dict(self.layers)
        for path, uses in seen.items():
            pairs = itertools.zip_longest(self.layers[path], uses)
            self.layers[path] = [max((u for u in pair if u is not None), key=lambda u: u.size) for pair in pairs]
        return before != self.layers

    def holders(self, path: str) -> list[nn.Module]:
        """The modules that hold the parameters of a layer: itself first, then those tied to it."""
        return self._families[path]

    def unused(self) -> list[str]:
        """Trainable layers that no pass has used."""
        return [path for path, uses in self.layers.items() if not uses]

    def uses(self, path: str) -> list[LayerUse]:
        """What is known of a layer's uses; one that was never seen counts as used once."""
        return self.layers[path] or [LayerUse((), ())]

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        """Layers whose weights may be clipped."""
        return ((path, self.model.get_submodule(path)) for path in self.layers)

    def measure(self, path: str, knorm: Any) -> None:
        """Limits are l2 norms."""

    def evaluate(self, numerics: Numerics, known: Mapping[str, Scalar] | None = None) -> dict[str, Evaluation]:
        """The limit of every layer."""
        return {path: self._layer(path) for path in self.layers}

    def _layer(self, path: str) -> Evaluation:
        joint = self.bounds.of("joint_cap", path)
        if joint is not None:
            return Evaluation(math.inf, math.inf, math.inf, joint)
        radius, cotangent = self.limit("layer_radius", path), self.limit("cotangent_radius", path)
        total: Scalar = math.inf
        if radius is not None and cotangent is not None:
            room = sum(enforced_to(use) ** 2 for use in self.uses(path))
            total = times(times(radius, cotangent), room)
        cap = self.limit("layer_cap", path)
        if cap is not None:
            total = least(total, cap) if self.quantiles is None else cap
        bound = math.inf
        return Evaluation(bound, bound if radius is None else radius, bound if cotangent is None else cotangent, total)

    def dimension(self, path: str) -> int:
        return sum(q.numel() for _, q in trained(self.holders(path)))
