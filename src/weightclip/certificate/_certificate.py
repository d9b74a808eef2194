"""From a model, a loss and bounds to a certificate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weightclip.bounds import Numerics
from weightclip.certificate._bounds import Bounds
from weightclip.certificate._graph import trace
from weightclip.certificate._plan import Plan
from weightclip.certificate._table import Certificate
from weightclip.errors import CertificationError
from weightclip.losses import Loss, recognise


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
        bounds = Bounds(
            **{**{f: getattr(bounds, f) for f in bounds.__dataclass_fields__}, "input_radius": input_radius}
        )
    plan = build_plan(model, recognise(loss), bounds, example)
    return plan.certificate(plan.evaluate(numerics or Numerics()))
