"""Report and pictures on disk."""

from __future__ import annotations

from pathlib import Path

from weightclip.audit._accountants import write_accountants
from weightclip.audit._figures import audit_figure, printed_figure
from weightclip.audit._suite import Report


def write_report(report: Report, folder: Path) -> list[Path]:
    """report.json, audit.png, report.md, the accountants' table and one picture per flaw that was caught."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "report.json", audit_figure(report, folder / "audit.png"), folder / "report.md"]
    files[0].write_text(report.to_json() + "\n")
    files[2].write_text(_markdown(report))
    if report.accountants:
        write_accountants(report.accountants, folder)
        files.append(folder / "accountants.md")
    for i, case in enumerate(report.printed):
        name = "".join(ch if ch.isalnum() else "-" for ch in case.name.lower()).replace("--", "-")
        files.append(printed_figure(case, folder / "printed" / f"{i:02d}-{name}.png"))
    return files


def _markdown(report: Report) -> str:
    lines = [
        f"# Audit, seed {report.seed}, delta {report.delta:g}", "",
        f"{len(report.failures)} violations in {len(report.checks)} checks of the sound trainer.", "",
        "| audit | trainer | measured | allowed | found | verdict |", "|---|---|---:|---:|---|---|",
    ]  # fmt: skip
    for c in report.checks:
        verdict = "**violation**" if c.violation else "ok"
        lines.append(f"| {c.audit} | {c.subject} | {c.measured:.4g} | {c.allowed:g} | {c.note} | {verdict} |")
    head = "| flaw | case | shift / allowed | 95% lower bound | GDP estimate | caught |"
    if not report.printed:
        return "\n".join([*lines, ""])
    lines += ["", "## The algorithm as printed, claimed epsilon = 1", "", head, "|---|---|---:|---:|---:|---|"]
    for p in report.printed:
        lines.append(f"| {p.name} | {p.note} | {p.shift:.3g} | {p.result.epsilon_lower:.3g} | "
                     f"{p.result.epsilon_gdp:.3g} | {'yes' if p.result.violation else '**no**'} |")  # fmt: skip
    return "\n".join([*lines, ""])
