"""The privacy statement of a run."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from weightclip.accounting import Mechanism
from weightclip.accounting import epsilon as epsilon_of
from weightclip.certificate import Certificate
from weightclip.engine._statement import FORMAT
from weightclip.noise import Release, combine
from weightclip.sampling import TAIL

if TYPE_CHECKING:
    from weightclip.engine._engine import PrivacyEngine

NOT_COVERED = (
    "values of the training loss or accuracy shown during training",
    "initial weights, frozen parts, shapes and feature statistics, where they come from private data",
    "hyper-parameter search on the private data, unless its cost is accounted (accounting.search_cost)",
    "errors, timing and memory use that depend on records",
    "bit patterns of floating-point noise, unless the release is rounded to a grid",
    "other computations of the training loop on the records",
)
UNCOUNTED = (
    "releases made after the checkpoint this run was resumed from, by the run that saved it or by other resumes: only "
    "a ledger (PrivacyEngine(ledger=path)) counts them"
)
LEDGER = "deleting the ledger, or writing another in its place: its checksums are no signature"
PLACE = (
    "place: rounding of one record's own activations where it depends on the shape of its batch or on its row in it "
    "(records on a kink of ReLU); make_private(strict=True) covers it"
)
COLLATE = (
    "collate_fn: whether it treats records alone is not tested. One that pads to the longest record of a batch lets "
    "that record change all others: pad to one public length"
)
SEEDED = "anybody who knows the seed of generator=, and several runs of one seed together: equal draws do not compose"
ROUNDING = "rounding of float32 sums over records (Product.fast)"


def as_released(certificate: Certificate, release: Release) -> Certificate:
    """The certificate with sensitivities as the noise is calibrated to them: rounding slack and floor included."""
    values = release.enlarged(torch.tensor([row.sensitivity for row in certificate.rows], dtype=torch.float64))
    rows = (replace(row, sensitivity=v) for row, v in zip(certificate.rows, values.tolist(), strict=True))
    return replace(certificate, rows=tuple(rows))


def privacy_report(engine: PrivacyEngine, delta: float | None) -> dict[str, Any]:
    """See :meth:`weightclip.PrivacyEngine.report`."""
    certificate = engine.certificate()
    values = torch.tensor([r.sensitivity for r in certificate.rows], dtype=torch.float64)
    scales = engine.training.release.scales(values)
    delta = delta if delta is not None else getattr(engine, "target_delta", None)
    epsilon = engine.get_epsilon(delta) if delta is not None else None
    return {
        "format": FORMAT,
        "library": {"weightclip": version_of_package("weightclip"), "torch": str(torch.__version__),
                    "dp-accounting": version_of_package("dp-accounting")},
        "adjacency": engine.adjacency.name,
        "accountant": engine.accountant,
        "public": {
            "noise_multiplier": engine.noise_multiplier, "sample_rate": engine.loader.sample_rate,
            "expected_batch_size": engine.expected_batch_size,
            "physical_batches_per_draw": engine.loader.pieces, "steps": engine.steps, "budget_steps": engine.budget,
            "largest_batch_for_rounding": engine.b_max, "norm_exponent": _number(float(engine.bounds.p)),
            "allocation": repr(engine.training.release.allocation), "bounds": repr(engine.bounds),
            "loss": repr(engine.criterion.loss), "loss_bound": _number(engine.plan.loss_bound),
            "augmentation_multiplicity": engine.views, "release_grid": engine.training.release.grid,
        },
        "mechanisms": [
            {**m.to_json(), "epsilon": None if delta is None else _number(_alone(engine, m, delta))}
            for m in engine.mechanisms()
        ],
        "delta": delta,
        "epsilon": None if epsilon is None else _number(epsilon),
        "layers": [
            {"name": row.name, "sensitivity": row.sensitivity, "noise": float(s), "parameters": row.parameters,
             "gain": _number(row.gain), "input_bound": _number(row.input_bound),
             "cotangent_bound": _number(row.cotangent_bound)}
            for row, s in zip(certificate.rows, scales, strict=True)
        ],
        "joint_multiplier": _joint_multiplier(engine, values),
        "adaptive": None if engine.training.quantiles is None else engine.training.quantiles.report(),
        "joint_cap": any(t is not None for t in engine.training.release.joint),
        "secure_noise": engine.streams.is_secure,
        "ledger": None if engine.ledger is None else engine.ledger.state(),
        "secure": engine.streams.is_secure,
        "strict": engine.loader.strict,
        "ranks": engine.ranks.count,
        "independence": _independence(engine),
        "not_covered": [*NOT_COVERED, *_uncovered(engine)],
    }  # fmt: skip


def _alone(engine: PrivacyEngine, mechanism: Mechanism, delta: float) -> float:
    """What one of the mechanisms costs by itself; together they cost less than the sum of these."""
    return epsilon_of([mechanism], delta - mechanism.steps * TAIL, engine.accountant, engine.adjacency)


def _independence(engine: PrivacyEngine) -> str:
    """How it is known that records do not influence each other's products."""
    tested = any(found is not None for found in engine.training.tested.values())
    if engine.plan.graph is None:
        return "tested"
    return "tested, and traced" if tested else "traced"


def public_constants(engine: PrivacyEngine) -> dict[str, Any]:
    """What a ledger says about a run besides its mechanism."""
    return {
        "expected_batch_size": engine.expected_batch_size, "accountant": engine.accountant,
        "delta": getattr(engine, "target_delta", None), "secure_noise": engine.streams.is_secure,
        "weightclip": version_of_package("weightclip"),
    }  # fmt: skip


def _uncovered(engine: PrivacyEngine) -> list[str]:
    """What this run does not cover beside what no run does."""
    covered = {PLACE: engine.loader.strict, COLLATE: engine.loader.stacks, SEEDED: engine.streams.is_secure,
               ROUNDING: engine.bounds.product.covered, UNCOUNTED: not engine.uncounted,
               LEDGER: engine.ledger is None}  # fmt: skip
    return [line for line, is_covered in covered.items() if not is_covered]


def _joint_multiplier(engine: PrivacyEngine, values: torch.Tensor) -> float | None:
    """Of everything a step releases: gradients of all layers, and quantiles. None for a mechanism that has none."""
    if engine.training.release.knorm is not None:
        return None
    if engine.noise_multiplier == 0:
        return 0.0
    parts = [engine.training.release.multiplier(values)]
    if engine.training.quantiles is not None:
        parts += [2 * engine.training.quantiles.sigma_b] * len(engine.training.quantiles.queries)
    return combine(parts)


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


@functools.cache
def version_of_package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
