"""Regressors on small real tables, nothing declared, with their targets and with shuffled ones: ever below the mean?

    python studies/benchmarks/regression.py --extra DIR --runs 5

DIR holds the data of a package (``pip install --no-deps --target DIR islp``); without it only scikit-learn's diabetes
runs. Every run has a split of its own (a fifth for the test) and seeds its noise with its number. `error_of_mean` and
`below_mean` are those of ``collapse.py``. Constants of the estimator's last look were chosen with an eye on these
tables.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from collapse import below_mean
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from weightclip.tabular import LipDPRegressor

# file, target, columns that name rows or repeat the target
TABLES = (
    ("Auto", "mpg", ("name",)), ("Bikeshare", "bikers", ("casual", "registered")), ("Boston", "medv", ()),
    ("Carseats", "Sales", ()), ("College", "Grad.Rate", ()), ("Credit", "Balance", ("ID",)),
    ("Wage", "wage", ("logwage",)),
)  # fmt: skip


def tables(folder: Path | None) -> Iterator[tuple[str, pd.DataFrame, np.ndarray]]:
    """Name, columns and target of each table."""
    diabetes: Any = load_diabetes()
    yield "diabetes", pd.DataFrame(diabetes.data, columns=diabetes.feature_names), diabetes.target
    for name, target, left_out in TABLES if folder else ():
        assert folder is not None
        frame = pd.read_csv(folder / "ISLP/data" / f"{name}.csv")
        y = frame.pop(target).to_numpy(float)
        frame = frame.drop(columns=[c for c in (*left_out, "Unnamed: 0") if c in frame])
        text = [c for c in frame if not pd.api.types.is_numeric_dtype(frame[c])]
        yield name, frame.astype({c: "category" for c in text}), y


def run(X: pd.DataFrame, y: np.ndarray, epsilon: float, seed: int, shuffled: bool) -> tuple[float, float, float]:
    """R² on test records: of a private fit, of the constant it would fall back on, of a linear model (not private)."""
    rng = np.random.RandomState(seed)
    order = rng.permutation(len(y))
    y = rng.permutation(y) if shuffled else y
    test, train = order[: len(y) // 5], order[len(y) // 5 :]
    model = LipDPRegressor(epsilon, random_state=seed).fit(X.iloc[train], y[train])
    constant = float(np.mean(model.predict(X.iloc[train])))
    encode = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore"), make_column_selector(dtype_include="category")),  # type: ignore[arg-type]
        remainder="passthrough",
    )
    linear = make_pipeline(encode, LinearRegression()).fit(X.iloc[train], y[train])
    base = 1 - float(np.mean((y[test] - constant) ** 2) / np.var(y[test]))
    return float(model.score(X.iloc[test], y[test])), base, float(linear.score(X.iloc[test], y[test]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extra", type=Path, help="folder with the package of tables")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("results/estimators/regression.csv"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, X, y in tables(arguments.extra):
        for shuffled in (False, True):
            found = [run(X, y, arguments.epsilon, seed, shuffled) for seed in range(arguments.runs)]
            scores, base, linear = np.array(found).T
            rows.append({
                "table": name, "target": "shuffled" if shuffled else "real", "records": len(y), "columns": X.shape[1],
                "epsilon": arguments.epsilon, "runs": arguments.runs, "median": f"{np.median(scores):.4f}",
                "worst": f"{scores.min():.4f}", **below_mean(scores, base, "regression"),
                "linear_not_private": f"{np.median(linear):.4f}",
            })  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
            with arguments.out.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
