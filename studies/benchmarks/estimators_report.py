"""Table (Markdown) and picture of results/estimators/compare.csv, written beside it.

python studies/benchmarks/estimators_report.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "LipDPClassifier": "default",
    "LipDPClassifier (nothing public)": "default, nothing public",
    "LipDPClassifier tuned": "tuned",
    "DP-SGD tuned": "DP-SGD, tuned",
    "Opacus with our preprocessing tuned": "Opacus, our preprocessing, tuned",
    "DP-EBM": "DP-EBM",
    "diffprivlib LogisticRegression": "diffprivlib logistic",
    "diffprivlib GaussianNB": "diffprivlib Bayes",
    "logistic regression (not private)": "logistic, not private",
    "gradient boosting (not private)": "boosting, not private",
}
DRAWN = ("LipDPClassifier", "LipDPClassifier tuned", "DP-SGD tuned", "DP-EBM", "gradient boosting (not private)")


def markdown(rows: pd.DataFrame) -> str:
    """One line for each set and budget: accuracy / AUC in percent."""
    found = [name for name in COLUMNS if name in set(rows["estimator"])]
    lines = ["| data set | ε | " + " | ".join(COLUMNS[name] for name in found) + " |"]
    lines.append("|---|---|" + "---|" * len(found))
    private = rows[rows["epsilon"] != "inf"]
    for dataset, epsilon in sorted(set(zip(private["dataset"], private["epsilon"], strict=True))):
        cells = []
        for name in found:
            budget = "inf" if "not private" in name else epsilon
            match = rows[(rows["dataset"] == dataset) & (rows["estimator"] == name) & (rows["epsilon"] == budget)]
            scores = zip(match["accuracy"], match["auc"], strict=True)
            cells.append("".join(f"{100 * accuracy:.1f} / {100 * auc:.1f}" for accuracy, auc in scores))
        lines.append(f"| {dataset} | {epsilon} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def picture(rows: pd.DataFrame, path: Path) -> None:
    """Accuracy and AUC at ε = 1, one line of dots for each set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = rows[(rows["epsilon"].isin(["1", "inf"])) & rows["estimator"].isin(DRAWN)]
    sets = sorted(set(shown["dataset"]), reverse=True)
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.36 * len(sets) + 1.4), sharey=True)
    for axis, metric in zip(axes, ("accuracy", "auc"), strict=True):
        for name, marker in zip(DRAWN, ("o", "D", "s", "^", "|"), strict=True):
            part = shown[shown["estimator"] == name]
            label = COLUMNS[name] if name not in DRAWN[:2] else f"LipDPClassifier, {COLUMNS[name]}"
            axis.plot(part[metric], [sets.index(d) for d in part["dataset"]], marker, label=label, alpha=0.8,
                      zorder=3 if name == DRAWN[0] else 2)  # fmt: skip
        axis.set_xlabel({"accuracy": "accuracy", "auc": "area under the curve"}[metric])
        axis.set_yticks(range(len(sets)), sets)
        axis.grid(axis="y", alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=ROOT / "results/estimators/compare.csv")
    options = parser.parse_args()
    rows = pd.read_csv(options.table, dtype={"epsilon": str})
    options.table.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")
    picture(rows, options.table.with_suffix(".png"))


if __name__ == "__main__":
    main()
