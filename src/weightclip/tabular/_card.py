"""The model card of a table's model: the engine's card, with columns and classes."""

from __future__ import annotations

from typing import Any

from weightclip.engine import model_card as private_card
from weightclip.engine import one_line


def model_card(pipeline: dict[str, Any], report: dict[str, Any]) -> str:
    """A model card from the pipeline description and the privacy report; nothing else is read."""
    task = pipeline["task"]
    target = one_line(pipeline.get("target") or "the target")
    facts = [
        report["statement"],
        f"records: {report['public']['records']:,}; columns: {len(pipeline['columns'])}",
        f"network: dense, hidden layers {pipeline['hidden'] or 'none'}, {pipeline['outputs']} output(s)",
    ]
    if (text := pipeline.get("text")) is not None:
        tuned = f", fine-tuned by updates of rank {text['lora']['rank']}" if "lora" in text else ""
        read = f"read through the encoder {one_line(text['encoder'])}{tuned}"
        facts.append(f"text of column {one_line(text['column'])}, {read}")
    if task == "classification":
        shown = ", ".join(one_line(str(c)) for c in pipeline["classes"][:20])
        more = len(pipeline["classes"]) - 20
        facts.append(f"classes: {shown}{f' and {more} more' if more > 0 else ''}")
    else:
        low, high = pipeline["target_range"]
        facts.append(f"predictions are clipped to [{low:g}, {high:g}]")
    paid = ["## Preprocessing", "", *(f"- {line}" for line in report["preprocessing"])]
    columns = ["## Columns", "", "| column | type | public range or categories |", "|---|---|---|"]
    columns += [f"| {one_line(c['name'])} | {c['type']} | {_known(c)} |" for c in pipeline["columns"]]
    use = [
        "## Use and check it",
        "",
        "`weightclip predict MODEL data.csv` predicts; `weightclip verify MODEL` recomputes epsilon from this folder "
        "and finds changed files; `weightclip certify MODEL` shows the sensitivities.",
    ]
    return private_card(
        report,
        f"Private {task} model for `{target}`",
        facts=facts,
        sections=["\n".join(part) for part in (paid, columns, use)],
        head={"pipeline_tag": f"tabular-{task}"},
    )


def _known(column: dict[str, Any]) -> str:
    if "low" in column:
        return f"[{column['low']:g}, {column['high']:g}]"
    return f"{len(column['categories'])} categories" if "categories" in column else "none"
