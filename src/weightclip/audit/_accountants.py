"""Independent accountants side by side: a wrong epsilon in one of them shows as disagreement."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from weightclip.accounting import Mechanism, epsilon, gdp_epsilon

_PRV_ERROR = 0.01

GRID = [(sigma, q, steps) for sigma in (0.7, 1.0, 2.0, 5.0) for q in (0.001, 0.01, 0.1, 1.0)
        for steps in (1, 100, 2000) if q < 1 or steps <= 100]  # fmt: skip
SHORT_GRID = [(1.0, 0.01, 100), (1.0, 0.01, 2000), (2.0, 0.1, 100), (1.0, 1.0, 1), (5.0, 1.0, 100)]


@dataclass(frozen=True)
class AccountantRow:
    """epsilon of one setting by every accountant; None where one cannot answer."""

    sigma: float  #: noise multiplier
    q: float  #: sampling rate
    steps: int
    delta: float
    pld: float  #: ours by default: privacy loss distributions, an upper bound
    rdp: float  #: ours as in the paper: Renyi divergences, an upper bound
    #: dp-accounting's PLD accountant with its default grid; ours chooses its own and adds its rounding
    dp_accounting: float | None
    opacus_rdp: float | None  #: Opacus, Renyi divergences
    opacus_prv: float | None  #: Opacus, privacy random variables (upper end of its error interval of 2 * 0.01)
    exact: float | None  #: the Gaussian mechanism's own formula, where q = 1

    @property
    def disagreement(self) -> str:
        """What does not fit together, in words; empty if all does.

        PLD must not fall below the truth (exact, or PRV's lower end), must agree with dp-accounting's and must not
        exceed RDP's bound; our RDP must not fall below Opacus's (it may exceed it at very large epsilon, where the
        orders differ).
        """
        slack = 1e-3
        if self.exact is not None and not self.exact * (1 - 1e-9) <= self.pld <= self.exact * 1.01 + slack:
            return f"PLD {self.pld:.5g}, exact {self.exact:.5g}"
        if self.opacus_prv is not None and self.pld < self.opacus_prv - 2 * _PRV_ERROR - slack:
            return f"PLD {self.pld:.5g} below PRV {self.opacus_prv:.5g}"
        if self.dp_accounting is not None and abs(self.pld - self.dp_accounting) > 0.01 * self.dp_accounting + slack:
            return f"PLD {self.pld:.5g}, dp-accounting {self.dp_accounting:.5g}"
        if self.pld > self.rdp * 1.001 + slack:
            return f"PLD {self.pld:.5g} above RDP {self.rdp:.5g}"
        if self.opacus_rdp is not None and self.rdp < 0.995 * self.opacus_rdp - slack:
            return f"RDP {self.rdp:.5g}, Opacus {self.opacus_rdp:.5g}"
        return ""


def compare_accountants(
    grid: Sequence[tuple[float, float, int]] = tuple(GRID), delta: float = 1e-5
) -> list[AccountantRow]:
    """One row per setting (sigma, q, steps); Opacus columns need Opacus (extra ``study``)."""
    rows = []
    for sigma, q, steps in grid:
        released = [Mechanism("gaussian", sigma, q, steps)]
        exact = gdp_epsilon(math.sqrt(steps) / sigma, delta) if q == 1 else None
        others = (_dp_accounting(sigma, q, steps, delta), _opacus("rdp", sigma, q, steps, delta),
                  _opacus("prv", sigma, q, steps, delta))  # fmt: skip
        ours = epsilon(released, delta), epsilon(released, delta, "rdp")
        rows.append(AccountantRow(sigma, q, steps, delta, *ours, *others, exact))
    return rows


def _dp_accounting(sigma: float, q: float, steps: int, delta: float) -> float | None:
    accountant = PLDAccountant()  # adding or removing one record
    accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)
    value = float(accountant.get_epsilon(delta))
    return value if math.isfinite(value) else None


def _opacus(kind: str, sigma: float, q: float, steps: int, delta: float) -> float | None:
    try:
        from opacus.accountants import create_accountant
    except ImportError:
        return None
    accountant = create_accountant(kind)
    accountant.history = [(sigma, q, steps)]  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on optimal orders at the ends of its list
        try:
            settings = {"eps_error": _PRV_ERROR} if kind == "prv" else {}
            value = float(accountant.get_epsilon(delta, **settings))
        except (RuntimeError, ValueError, AssertionError, MemoryError, OverflowError):
            return None  # PRV has no grid for some extreme settings
    return value if math.isfinite(value) else None


def write_accountants(rows: Sequence[AccountantRow], folder: Path) -> None:
    """accountants.csv and accountants.md."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f.name for f in fields(AccountantRow)]
    with (folder / "accountants.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    head = "sigma | q | steps | PLD (ours) | RDP (ours) | dp-accounting PLD | Opacus RDP | Opacus PRV | exact"
    lines = [f"| {head} | disagreement |", "|" + "---:|" * 9 + "---|"]
    for row in rows:
        numbers = (row.pld, row.rdp, row.dp_accounting, row.opacus_rdp, row.opacus_prv, row.exact)
        cells = [f"{row.sigma:g}", f"{row.q:g}", f"{row.steps}", *("" if v is None else f"{v:.4g}" for v in numbers)]
        lines.append("| " + " | ".join([*cells, row.disagreement or "none"]) + " |")
    head_line = f"# epsilon at delta = {rows[0].delta:g} by independent accountants"
    text = [head_line, "", "Adding or removing one record, Poisson sampling.", "", *lines, ""]
    (folder / "accountants.md").write_text("\n".join(text))
