"""DP-EBM and diffprivlib for ``estimators.py``, which calls this with another interpreter: needs nothing of weightclip.

Reads a job (JSON) from standard input, writes class probabilities on the test records and seconds for every split.
"""

import json
import sys
import time
import warnings

import numpy as np
import pandas as pd

warnings.simplefilter("ignore")
MISSING = "(missing)"


def ebm(job, X, y, train, seed):
    """InterpretML's DP explainable boosting machine with its defaults; binning is paid for."""
    from interpret.privacy import DPExplainableBoostingClassifier  # pyright: ignore[reportMissingImports]

    bounds, types = {}, []
    for c in job["columns"]:
        if c["type"] == "categorical":  # public categories are free; "nominal" would pay to find them
            types.append([*(str(v) for v in c["categories"]), MISSING] if c.get("categories") else "nominal")
        else:
            types.append("continuous")
            bounds[c["name"]] = (float(c.get("low", 0)), float(c.get("high", 1)))
    model = DPExplainableBoostingClassifier(
        epsilon=job["epsilon"],
        delta=job["delta"],
        privacy_bounds=bounds,
        feature_types=types,
        feature_names=list(X.columns),
        random_state=seed,
        n_jobs=1,
    )
    model.fit(X.iloc[train], y[train])
    return model, X


def scaled(job, X):
    """Public min-max scaling and one-hot encoding."""
    blocks = []
    for c in job["columns"]:
        x = X[c["name"]]
        if c["type"] == "categorical":
            blocks.append((x.astype(str).to_numpy()[:, None] == np.array(c["categories"])[None, :]).astype(float))
        else:
            low, high = float(c.get("low", 0)), float(c.get("high", 1))
            blocks.append(np.clip(np.nan_to_num((x.to_numpy(float)[:, None] - low) / (high - low)), 0, 1))
    return np.concatenate(blocks, axis=1)


def logistic(job, X, y, train, seed):
    """diffprivlib's logistic regression (objective perturbation)."""
    from diffprivlib.models import LogisticRegression  # pyright: ignore[reportMissingImports]

    Z = scaled(job, X)
    norm = float(np.sqrt(sum(1 for _ in job["columns"])))
    model = LogisticRegression(epsilon=job["epsilon"], data_norm=norm, random_state=seed, max_iter=500)
    model.fit(Z[train], y[train])
    return model, Z


def bayes(job, X, y, train, seed):
    """diffprivlib's Gaussian naive Bayes."""
    from diffprivlib.models import GaussianNB  # pyright: ignore[reportMissingImports]

    Z = scaled(job, X)
    model = GaussianNB(epsilon=job["epsilon"], bounds=(0, 1), random_state=seed)
    model.fit(Z[train], y[train])
    return model, Z


def main():
    job = json.load(sys.stdin)
    frame = pd.read_csv(job["csv"], keep_default_na=False, na_values=[""])
    y = frame.pop("(y)").to_numpy()
    for c in job["columns"]:
        if c["type"] == "categorical":
            text = frame[c["name"]].astype(
                str
            )  # what is no public category counts as missing, which is one more of them
            listed = [str(v) for v in c.get("categories") or ()]
            frame[c["name"]] = text.where(text.isin(listed), MISSING) if listed else text
    results = []
    for seed, (train, _, test) in enumerate(job["splits"]):
        start = time.perf_counter()
        model, Z = {"ebm": ebm, "logistic": logistic, "bayes": bayes}[job["what"]](job, frame, y, np.array(train), seed)
        seconds = time.perf_counter() - start
        part = Z.iloc[test] if hasattr(Z, "iloc") else Z[test]
        p = np.zeros((len(test), int(y.max()) + 1))
        p[:, np.asarray(model.classes_).astype(int)] = np.nan_to_num(model.predict_proba(part))
        results.append((p.tolist(), seconds))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
