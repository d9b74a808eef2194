"""The privacy statement of a fitted estimator: every mechanism, every public constant, and what is not covered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from weightclip.accounting import Mechanism, NegativeBinomialRuns, epsilon, search_cost
from weightclip.engine import FORMAT, one_line, version_of_package
from weightclip.engine import model_card as private_card
from weightclip.sampling import TAIL
from weightclip.tabular._encoder import Fitted
from weightclip.tabular._plan import FitPlan
from weightclip.tabular._training import Settings, Trained

NOT_COVERED = (
    "the number of records, the column names and types, and the list of classes: they count as public",
    "choosing among several fits on the same records (cross-validation, grid search): each fit costs its own epsilon",
    "errors, timing and memory use that depend on records",
    "bit patterns of floating-point noise",
    "place: rounding of one record's own activations where it depends on the size of its batch or on its row in it",
)
GUESSED = "anyone who can guess random_state: noise from a seed protects only while it is secret"


def left_of(delta: float, mechanisms: Sequence[Mechanism]) -> float:
    """delta, less the chance that a draw exceeds what rounding is allowed for (SOUNDNESS Theorem 27)."""
    return delta - TAIL * sum(m.steps for m in mechanisms if m.q < 1)


def privacy_report(fitted: Fitted, run: Trained, plan: FitPlan, n: int, public: dict[str, Any]) -> dict[str, Any]:
    """A JSON-ready statement; its epsilon is computed from the mechanisms it lists.

    Formal guarantees:
        ``epsilon(mechanisms, delta)`` of everything the fitted estimator holds, for data sets that differ by adding or
        removing one record. Infinite when statistics were read without paying.
    """
    mechanisms, delta, accountant = [*fitted.mechanisms, run.mechanism], plan.delta, plan.accountant
    secure = plan.streams.is_secure
    total = math.inf if fitted.uncovered else epsilon(mechanisms, left_of(delta, mechanisms), accountant)
    return {
        "format": FORMAT,
        "statement": f"({_text(total)}, {delta:g})-differentially private for adding or removing one record.",
        "epsilon": _number(total),
        "delta": delta,
        "target_epsilon": plan.epsilon,
        "adjacency": "ADD_OR_REMOVE_ONE",
        "accountant": accountant,
        "mechanisms": [_entry(m, delta, accountant) for m in mechanisms],
        "preprocessing": [*fitted.statements, *(f"NOT PRIVATE: {u}" for u in fitted.uncovered)],
        "public": {
            "records": n, **public, "sample_rate": run.q, "expected_batch_size": run.batch, "steps": run.steps,
        },
        "not_covered": [*(() if secure else (GUESSED,)), *fitted.uncovered, *plan.not_covered, *NOT_COVERED],
        "secure_noise": secure,
        "library": {name: version_of_package(name) for name in ("weightclip", "torch", "dp-accounting")},
        "layers": list(run.layers),
    }  # fmt: skip


def settings_json(settings: Settings) -> dict[str, Any]:
    """Settings as JSON-ready numbers, strategies by their text."""
    raw = {f.name: getattr(settings, f.name) for f in fields(settings)}
    plain = (int, float, str, bool, type(None))
    return {k: list(v) if isinstance(v, tuple) else v if isinstance(v, plain) else repr(v) for k, v in raw.items()}


def mechanisms_of(report: dict[str, Any]) -> list[Mechanism]:
    """The mechanisms a report lists."""
    return [
        Mechanism(m["kind"], m.get("sigma"), m["q"], m["steps"], m.get("epsilon0"), m.get("label", ""))
        for m in report["mechanisms"]
    ]  # fmt: skip


def recompute(report: dict[str, Any], delta: float | None = None, accountant: str | None = None) -> float:
    """ε from the mechanisms a report lists, at its δ or another; of the whole search where there was one."""
    mechanisms, delta = mechanisms_of(report), float(report["delta"] if delta is None else delta)
    if (search := report.get("search")) is not None:
        return searched_epsilon(mechanisms, delta, search["mean_runs"], report["target_epsilon"])
    left = left_of(delta, mechanisms)
    return epsilon(mechanisms, left, accountant or report["accountant"], report["adjacency"].lower())


def searched_epsilon(mechanisms: Sequence[Mechanism], delta: float, mean_runs: float, target: float) -> float:
    """ε of a search that releases the best of a geometric number of runs; ``mechanisms`` are those of one run.

    Formal guarantees:
        `accounting.search_cost`, after taking from δ the chance that any draw of any run holds more records than the
        slack of its sums covers (TAIL each; e^ε of it, since the search amplifies what fails).
    """
    draws = sum(m.steps for m in mechanisms if m.q < 1)
    left = delta - (1 + math.exp(min(target, 30.0))) * mean_runs * draws * TAIL
    return search_cost(mechanisms, left, NegativeBinomialRuns(mean_runs, 1.0))


def searched_report(
    run: dict[str, Any], mechanisms: Sequence[Mechanism], mean_runs: float, target: float, n: int, score: float
) -> dict[str, Any]:
    """The report of a whole search, from that of the `run` that won with a noisy `score` per record.

    `mechanisms` are what one run releases, its score included; `target` is the budget of the whole search, and `n`
    the public number of records, those of the validation included.
    """
    delta = run["delta"]
    total = searched_epsilon(mechanisms, delta, mean_runs, target)
    law = f"the best of a random number of runs ({mean_runs:g} on average), each of which releases what is listed"
    return {
        **run,
        "statement": f"({_text(total)}, {delta:g})-differentially private for adding or removing one record.",
        "epsilon": total,
        "target_epsilon": target,
        "accountant": "rdp",
        "mechanisms": [_entry(m, delta, "rdp") for m in mechanisms],
        "preprocessing": [*run["preprocessing"], f"search: {law}"],
        "search": {"mean_runs": mean_runs, "score": score},
        "public": {**run["public"], "records": n, "training_records": run["public"]["records"]},
        "not_covered": [*run["not_covered"], "how long the search took: it tells of the number of runs"],
    }


def _entry(m: Mechanism, delta: float, accountant: str) -> dict[str, Any]:
    alone = epsilon([m], delta, accountant)
    return {"label": m.label, "kind": m.kind, "sigma": m.sigma, "q": m.q, "steps": m.steps, "epsilon": _number(alone)}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _text(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "inf"


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
