"""The model card: what epsilon says about a model, in the format of the Hugging Face hub (YAML head, then Markdown)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from weightclip.engine._statement import FORMAT, nist_answers

TAGS = ("differential-privacy", "dp-sgd", "weightclip")


def model_card(
    report: dict[str, Any],
    title: str = "Private model",
    *,
    facts: Sequence[str] = (),
    sections: Sequence[str] = (),
    head: dict[str, Any] | None = None,
) -> str:
    """A model card from a privacy report; nothing else is read, so the card claims no more than the report.

    Args:
        report: ``engine.report(delta)`` or an estimator's ``privacy_report_``.
        title: The heading, one line.
        facts: Lines of a list below the statement.
        sections: Markdown that follows, each with its heading.
        head: Further entries of the YAML head, for instance ``{"license": "apache-2.0"}``.

    Returns:
        Markdown with a YAML head: tags, and ``differential_privacy`` with epsilon, delta, unit and accountant.

    Formal guarantees:
        None of its own: epsilon and delta are those of the report, which ``weightclip verify`` recomputes.
    """
    answers = nist_answers(report)
    delta = report.get("delta")
    privacy = {
        "epsilon": report.get("epsilon"), "delta": delta, "adjacency": report["adjacency"].lower(), "unit": "record",
        "accountant": report["accountant"], "secret_noise": bool(report.get("secure_noise", True)),
        "report_format": report.get("format", FORMAT),
    }  # fmt: skip
    meta = {"library_name": "weightclip", "tags": list(TAGS), **(head or {}), "differential_privacy": privacy}
    lines = ["---", *_yaml(meta), "---", "", f"# {title}", "", answers["What is the privacy guarantee?"]]
    lines += ["", *(f"- {fact}" for fact in facts), *([""] if facts else []), "## What was released", ""]
    lines += ["| mechanism | kind | noise | q | steps | epsilon alone |", "|---|---|---|---|---|---|"]
    for m in report["mechanisms"]:
        noise = f"sigma {m['sigma']:.4g}" if m.get("sigma") is not None else f"epsilon0 {m['epsilon0']:.4g}"
        alone = f"{m['epsilon']:.4g}" if isinstance(m["epsilon"], (int, float)) else str(m["epsilon"] or "not stated")
        lines.append(f"| {one_line(m['label'])} | {m['kind']} | {noise} | {m['q']:.4g} | {m['steps']} | {alone} |")
    law = f" (best of {report['search']['mean_runs']:g} such runs on average)" if "search" in report else ""
    at = "" if delta is None else f" at delta {delta:g}"
    lines += ["", f"Together{law}, by {report['accountant'].upper()}: epsilon {report.get('epsilon')}{at}."]
    lines += ["", "## Not covered by epsilon", "", *(f"- {line}" for line in report["not_covered"])]
    lines += ["", "## Questions of NIST SP 800-226", ""]
    lines += [f"- **{question}** {answer}" for question, answer in answers.items() if "side channels" not in question]
    for section in sections:
        lines += ["", section.strip()]
    return "\n".join([*lines, ""])


def one_line(text: str) -> str:
    """A name on one line of a Markdown table, whatever it holds."""
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())


def _yaml(value: dict[str, Any], indent: str = "") -> list[str]:
    """A mapping as YAML: scalars are written as JSON, which YAML reads but for 1e-05, a text to YAML 1.1."""
    lines: list[str] = []
    for key, entry in value.items():
        if isinstance(entry, dict):
            lines += [f"{indent}{key}:", *_yaml(entry, indent + "  ")]
        elif isinstance(entry, list):
            lines += [f"{indent}{key}:", *(f"{indent}- {json.dumps(item)}" for item in entry)]
        else:
            scalar = re.sub(r"^(-?\d+)e", r"\1.0e", json.dumps(entry))
            lines.append(f"{indent}{key}: {scalar}")
    return lines
