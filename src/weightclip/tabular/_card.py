"""The model card: what was trained, on what, and what its epsilon says, in Markdown."""

from __future__ import annotations

from typing import Any


def model_card(pipeline: dict[str, Any], report: dict[str, Any]) -> str:
    """A model card from the pipeline description and the privacy report; nothing else is read."""
    task = pipeline["task"]
    target = _cell(pipeline.get("target") or "the target")
    lines = [
        f"# Private {task} model for `{target}`",
        "",
        f"{report['statement']}",
        "",
        f"- records: {report['public']['records']:,}; columns: {len(pipeline['columns'])}",
        f"- network: dense, hidden layers {pipeline['hidden'] or 'none'}, {pipeline['outputs']} output(s)",
    ]
    if task == "classification":
        shown = ", ".join(_cell(str(c)) for c in pipeline["classes"][:20])
        more = len(pipeline["classes"]) - 20
        lines.append(f"- classes: {shown}{f' and {more} more' if more > 0 else ''}")
    else:
        lines.append(f"- predictions are clipped to [{pipeline['target_range'][0]:g}, {pipeline['target_range'][1]:g}]")
    lines += [
        "",
        "## What was released",
        "",
        "| mechanism | kind | sigma | q | steps | epsilon alone |",
        "|---|---|---|---|---|---|",
    ]
    for m in report["mechanisms"]:
        sigma = "" if m["sigma"] is None else f"{m['sigma']:.4g}"
        value = m["epsilon"] if isinstance(m["epsilon"], str) else f"{m['epsilon']:.4g}"
        lines.append(f"| {m['label']} | {m['kind']} | {sigma} | {m['q']:.4g} | {m['steps']} | {value} |")
    total = f"epsilon {report['epsilon']} at delta {report['delta']:g}"
    law = f" (best of {report['search']['mean_runs']:g} such runs on average)" if "search" in report else ""
    lines += ["", f"Together{law}, by {report['accountant'].upper()}: {total}, for adding or removing one record."]
    lines += ["", "## Preprocessing", ""]
    lines += [f"- {s}" for s in report["preprocessing"]]
    lines += ["", "## Not covered by epsilon", ""]
    lines += [f"- {s}" for s in report["not_covered"]]
    lines += ["", "## Columns", "", "| column | type | public range or categories |", "|---|---|---|"]
    for c in pipeline["columns"]:
        known = (
            f"[{c['low']:g}, {c['high']:g}]"
            if "low" in c
            else f"{len(c['categories'])} categories"
            if "categories" in c
            else "none"
        )
        lines.append(f"| {_cell(c['name'])} | {c['type']} | {known} |")
    lines += ["", "Check it: `weightclip certify` on this folder recomputes epsilon and the sensitivities.", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A name on one line of Markdown, whatever it holds."""
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())
