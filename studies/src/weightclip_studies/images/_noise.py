"""Noise multipliers of the study, calibrated once and kept in a file beside the results."""

from __future__ import annotations

import json
import os
from pathlib import Path

from weightclip.accounting import Mechanism, calibrate_sigma, epsilon

DELTA = 1e-5


class NoiseTable:
    """sigma for (epsilon, records, batch, steps) at delta = 1e-5, by PLD, adding or removing one record.

    Formal guarantees: every sigma was found by `calibrate_sigma`; `check` recomputes epsilon from it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.values: dict[str, float] = json.loads(path.read_text()) if path is not None and path.exists() else {}

    @staticmethod
    def _key(target: float, records: int, batch: int, steps: int) -> str:
        return f"{target:g}/{records}/{batch}/{steps}"

    def get(
        self, target: float | None, records: int, batch: int, steps: int, beside: tuple[Mechanism, ...] = ()
    ) -> float:
        """The multiplier, calibrated now if it is not in the table; 0 for no privacy.

        ``beside`` is what the run releases besides, within the same budget.
        """
        if target is None:
            return 0.0
        key = self._key(target, records, batch, steps) + "".join(f"/{m.sigma:g}x{m.steps}" for m in beside)
        if key not in self.values:
            q = min(1.0, batch / records)
            self.values[key] = calibrate_sigma(target, DELTA, q, steps, extra_mechanisms=beside)
        return self.values[key]

    def check(self, target: float, records: int, batch: int, steps: int) -> float:
        """Epsilon of the run, recomputed; an error if it exceeds the target."""
        sigma = self.get(target, records, batch, steps)
        spent = epsilon([Mechanism("gaussian", sigma, min(1.0, batch / records), steps)], DELTA)
        if spent > target * (1 + 1e-9):
            raise ValueError(f"noise table: epsilon {spent} exceeds {target} for {records}/{batch}/{steps}")
        return spent

    def save(self) -> None:
        """Write the table."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_name(f"{self.path.name}.{os.getpid()}")  # processes share the table
            scratch.write_text(json.dumps(dict(sorted(self.values.items())), indent=1) + "\n")
            scratch.replace(self.path)
