"""The privacy statement in the words of others: NIST SP 800-226's questions, and an entry for a deployment registry.

Both are made from a privacy report alone (``engine.report()``, or the report of a model folder), so that they say no
more than what can be recomputed from it.
"""

from __future__ import annotations

import re
from typing import Any

from weightclip.errors import WeightclipError

FORMAT = "1.0"
"""Version of the report's format, by semantic versioning: the first number grows when old readers would misread it."""

_NEIGHBOURS = {
    "ADD_OR_REMOVE_ONE": "data sets that differ by adding or removing one record",
    "REPLACE_ONE": "data sets of equal size that differ in one record",
}
_PRODUCT = ("name", "data_curators", "intended_use", "description", "publication_date")


def check_format(report: dict[str, Any]) -> None:
    """Refuse a privacy report that this version would misread.

    Reports of version 0.1 have no number and are read as 1.0. A larger second number only adds entries.

    Raises:
        WeightclipError: The format has another first number, or is no version.
    """
    found = report.get("format", FORMAT)
    if not isinstance(found, str) or not re.fullmatch(r"\d{1,4}\.\d{1,4}", found):
        raise WeightclipError(f"the report's format must be a version like {FORMAT!r}, got {str(found)[:20]!r}.")
    if found.split(".")[0] != FORMAT.split(".")[0]:
        raise WeightclipError(
            f"the privacy report has format {found}, this version reads {FORMAT}: use the version that wrote it."
        )


def nist_answers(report: dict[str, Any]) -> dict[str, str]:
    """What NIST SP 800-226 asks of a differential privacy guarantee, answered by a privacy report.

    Args:
        report: ``engine.report(delta)`` or an estimator's ``privacy_report_``.

    Returns:
        Question to answer, in the order of the publication: the guarantee, its unit, the algorithms and how their cost
        adds up, then what surrounds them.
    """
    check_format(report)
    pure = report.get("delta") in (None, 0, 0.0)
    guarantee = f"epsilon = {_text(report.get('epsilon'))}" + ("" if pure else f", delta = {report['delta']:g}")
    seeded = not report.get("secure_noise", True)
    library = report.get("library", {})
    return {
        "What is the privacy guarantee?": f"{'Pure' if pure else 'Approximate'} differential privacy, {guarantee}.",
        "What is the unit of privacy?": "One record (one element of the training data), for "
        + str(_NEIGHBOURS.get(report["adjacency"], report["adjacency"])) + ". Several records of one person are not "
        "one unit: group them first if persons are to be protected.",
        "Which trust model?": "Central: whoever trains sees the records; what is protected is everything released, "
        "every step's noisy gradient and weights included.",
        "Which algorithms, with which sensitivity?": _mechanisms(report) + " Each record's contribution is limited to "
        "its sensitivity where it is formed, whatever the model or the loss does.",
        "How does the cost add up?": f"Composition by {str(report['accountant']).upper()} over all mechanisms listed "
        "(dp-accounting), Poisson sampling included; anybody can recompute it from them (weightclip verify).",
        "What was done before training?": " ".join(report.get("preprocessing", [])) or "Whatever was done to the "
        "records before they reached the engine is not covered.",
        "What is done after training?": "Anything computed from released values alone costs nothing.",
        "Which randomness?": "A seed (experiments only): whoever knows it is not protected against." if seeded else
        "The operating system's, in keyed streams; noise never meets two different sums.",
        "Floating point?": "Rounding of sums is part of the sensitivity; bit patterns of the noise are removed by "
        "rounding the release to a grid, if asked for.",
        "Which side channels remain?": "; ".join(report["not_covered"]) + ".",
        "Which software?": ", ".join(f"{name} {number}" for name, number in library.items()) + ".",
    }  # fmt: skip


def registry_entry(report: dict[str, Any], **product: Any) -> dict[str, Any]:
    """An entry (tier 3) for the public registry of deployments, as a dictionary ready for JSON (which is YAML).

    Args:
        report: ``engine.report(delta)`` or an estimator's ``privacy_report_``.
        **product: What no report knows: ``name``, ``data_curators``, ``intended_use``, ``description``,
            ``publication_date``, ``justification``, ``data_domain``; what is left out is marked "to be filled in".
    """
    answers = nist_answers(report)
    todo = "to be filled in"
    pure = report.get("delta") in (None, 0, 0.0)
    parameters = {k: report[k] for k in ("epsilon", "delta") if isinstance(report.get(k), (int, float))}
    return {
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "product": {"data_product_type": "Machine learning model"} | {k: product.get(k, todo) for k in _PRODUCT},
            "dp_flavor": {
                "name": "Pure DP" if pure else "Approximate DP",
                "data_domain": product.get("data_domain", todo),
                "unprotected_quantities": answers["Which side channels remain?"],
            },
            "privacy_loss": {
                "privacy_unit": "Record",
                "privacy_unit_description": answers["What is the unit of privacy?"],
                "privacy_parameters": parameters,
            },
            "model": {"model_name": "Central", "release_type": "One-shot", "access_type": "Non-interactive",
                      "actors": answers["Which trust model?"]},
            "accounting": {"post_processing": answers["What is done after training?"],
                           "composition": answers["How does the cost add up?"]},
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": answers["What was done before training?"],
                "mechanisms": " ".join(answers[k] for k in ("Which algorithms, with which sensitivity?",
                                                            "Which randomness?", "Floating point?", "Which software?")),
                "justification": product.get("justification", todo),
            },
        },
    }  # fmt: skip


def _mechanisms(report: dict[str, Any]) -> str:
    def one(m: dict[str, Any]) -> str:
        size = f"noise multiplier {m['sigma']:.6g}" if m.get("sigma") is not None else f"epsilon {m['epsilon0']:.6g}"
        return (
            f"{m['label'] or 'release'}: {m['kind']} mechanism, {size}, sampling rate {m['q']:.6g}, {m['steps']} times"
        )

    return ("; ".join(map(one, report["mechanisms"])) or "nothing was released yet") + "."


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else "not stated" if value is None else str(value)
