"""Plans without a graph: every trainable layer has a limit of its own making, so nothing need be known between them.

SOUNDNESS section 7: with caps, or radii on both factors, on every trainable layer, the sensitivity of a layer is its
limit. Which layers are used, how often and on how much of a record is what the test of independence has seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from weightclip.bounds import Numerics, Scalar, least, times
from weightclip.certificate._bounds import Bounds, MovingLimits
from weightclip.certificate._plan import Evaluation, LayerUse, enforced_to, room_of
from weightclip.certificate._table import Certificate, Row
from weightclip.errors import CertificationError
from weightclip.factors import families, trained


class OpenPlan:
    """The trainable layers of a model and the limits on them.

    Args:
        model: The model.
        bounds: Caps, or radii on both factors, for every layer (:meth:`weightclip.Bounds.is_open`).

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
        self.quantiles: MovingLimits | None = None

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

    def limit(self, name: str, path: str) -> Scalar | None:
        """The limit ``name`` of a layer as it stands: the public constant, or what quantiles have made of it."""
        adapted = None if self.quantiles is None else self.quantiles.limit(name, path)
        return self.bounds.of(name, path) if adapted is None else adapted

    def room(self, path: str) -> float:
        """What float32 may do to norms and scales of a layer's products: its limit is enforced up to this factor."""
        return room_of(self.uses(path), len(self.layers))

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

    def certificate(self, evaluations: dict[str, Evaluation], slack: float = 1.0) -> Certificate:
        """The limits as a table; ``slack`` multiplies every sensitivity (rounding of the sum over records)."""
        rows = []
        for path, e in evaluations.items():
            module = self.model.get_submodule(path)
            kind = getattr(type(module), "_wc_native", type(module)).__name__
            count = sum(q.numel() for _, q in trained(self.holders(path)))
            rows.append(Row(path, kind, float(e.gain), float(e.x), float(e.cotangent), float(e.sensitivity) * slack,
                            count))  # fmt: skip
        joint = tuple(path for path in evaluations if self.bounds.of("joint_cap", path) is not None)
        return Certificate(tuple(rows), self.loss_bound, 2.0, joint)
