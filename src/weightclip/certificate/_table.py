"""A certificate as numbers: a row per layer, printable, JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass


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
