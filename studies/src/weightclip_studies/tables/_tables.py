"""Table 1 and the detailed table: ten seeds of every method on the test part, with the paper's numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from weightclip import accounting
from weightclip_studies import data as sets

from ._metrics import Array, holm, wilcoxon_p
from ._paper import best_lip, paper_accuracy, printed
from ._runs import Prepared, compute_runs, prepare, run_key
from ._search import Chosen, best_variant
from ._settings import combinations, name_of, parse_name, settings_for
from ._space import METHODS, PRINTED_METHODS, SOUND
from ._store import Store

COLUMNS = (
    "dataset", "method", "group_norm", "epsilon", "delta", "accountant", "covered", "seeds", "median", "mean", "sd",
    "wilcoxon_p", "paper",
)  # fmt: skip
"""Of table1.csv, fixed: others read the file."""

LEVEL = 0.05


@dataclass(frozen=True)
class TableRow:
    """One method on one data set over all seeds.

    Attributes:
        dataset: Data set.
        method: Method.
        group_norm: With group normalisation or without.
        epsilon: ε at δ by the row's accountant (claimed only, for the printed algorithms); None without privacy.
        delta: 1/n.
        accountant: "rdp", "pld" or "none".
        covered: What ε covers, and what it does not.
        seeds: Number of seeds.
        median: Median test accuracy.
        mean: Mean.
        sd: Standard deviation over seeds.
        wilcoxon_p: Signed-rank test against DP-SGD with the same normalisation, pairs by seed.
        paper: The paper's printed accuracy of the method.
        auc: Mean area under the curve.
        log_loss: Mean log-loss.
        ece: Mean expected calibration error.
        epsilon_pld: The tighter ε of the same runs by PLD.
        sigma: Noise multiplier.
        steps: T.
        q: Sampling rate.
        validation: Mean validation accuracy at which the settings were chosen.
        wall_s: Seconds per run.
        mark: "best", "tied" (not significantly below the best, by Holm's correction) or "", among the data set's
            methods whose ε holds.
        accuracies: By seed.
        config: The settings.
        parameters: Of the network; None without one.
    """

    dataset: str
    method: str
    group_norm: bool
    epsilon: float | None
    delta: float
    accountant: str
    covered: str
    seeds: int
    median: float
    mean: float
    sd: float
    wilcoxon_p: float | None
    paper: float | None
    auc: float
    log_loss: float
    ece: float
    epsilon_pld: float | None
    sigma: float | None
    steps: int | None
    q: float | None
    validation: float | None
    wall_s: float
    mark: str
    accuracies: tuple[float, ...]
    config: dict[str, Any]
    parameters: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def coverage(method: str, statement: str) -> str:
    """What the ε of a row covers, in words."""
    if method == "majority":
        return "nothing: the share of classes is taken from the data"
    if method == "non-private":
        return "nothing: no noise"
    if method in PRINTED_METHODS:
        return "claimed only: the printed algorithm leaks, see weightclip audit"
    return f"training (add or remove one record); {statement}; choice of settings not covered by ε"


def table_rows(
    store: Store,
    chosen: dict[str, dict[str, Chosen]],
    datasets: Sequence[str] | None = None,
    pairs: Iterable[tuple[str, bool]] | None = None,
    *,
    seeds: int = 10,
    encoding: str = "from-data",
    accountant: str = "rdp",
    progress: Callable[[str], None] | None = None,
) -> list[TableRow]:
    """Run every chosen setting on the test part with seeds 0, 1, ... and summarise.

    Args:
        store: Where runs are kept.
        chosen: Settings by data set and name.
        datasets: All seven by default.
        pairs: (method, group norm) pairs; all by default.
        seeds: Number of seeds.
        encoding: "from-data" (as in the paper) or "public".
        accountant: "rdp" (as in the paper) or "pld": by which σ is chosen for the paper's ε.
        progress: Called with a line per finished method.
    """
    pairs = list(combinations() if pairs is None else pairs)
    rows: list[TableRow] = []
    for dataset in datasets or sets.names():
        raw: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for method, group_norm in [*pairs, ("majority", False)]:
            entry = settings_for(chosen.get(dataset, {}), method, group_norm)
            if entry is None and method != "majority":
                continue
            config = entry.config if entry is not None else {}
            keys = [
                run_key(dataset, method, group_norm, config, s, "test", encoding=encoding, accountant=accountant)
                for s in range(seeds)
            ]
            raw[method, group_norm] = store.compute(keys, compute_runs)
            if progress is not None:
                median = np.median([v["accuracy"] for v in raw[method, group_norm]])
                progress(f"{dataset} {name_of(method, group_norm)}: median accuracy {median:.4f}")
        rows += _summarise(dataset, raw, chosen.get(dataset, {}), encoding, accountant)
    return _ordered(rows)


def _summarise(
    dataset: str,
    raw: dict[tuple[str, bool], list[dict[str, Any]]],
    chosen: dict[str, Chosen],
    encoding: str,
    accountant: str,
) -> list[TableRow]:
    prepared = prepare(dataset, encoding)
    accuracies = {pair: np.array([v["accuracy"] for v in values]) for pair, values in raw.items()}
    marks, rows = _marks(accuracies), []
    for (method, group_norm), values in raw.items():
        a = accuracies[method, group_norm]
        trained = method not in ("majority", "non-private")
        p = _against_dp_sgd(method, group_norm, accuracies)
        first = values[0]
        entry = settings_for(chosen, method, group_norm)
        rows.append(
            TableRow(
                dataset=dataset,
                method=method,
                group_norm=group_norm,
                epsilon=first["epsilon"] if trained else None,
                delta=prepared.delta,
                accountant=accountant if trained else "none",
                covered=coverage(method, prepared.covered),
                seeds=len(a),
                median=float(np.median(a)),
                mean=float(a.mean()),
                sd=float(a.std(ddof=1)) if len(a) > 1 else 0.0,
                wilcoxon_p=p,
                paper=paper_accuracy(dataset, method, group_norm),
                auc=_mean(values, "auc"),
                log_loss=_mean(values, "log_loss"),
                ece=_mean(values, "ece"),
                epsilon_pld=_pld(first, prepared.delta) if trained else None,
                sigma=first.get("sigma"),
                steps=first.get("steps"),
                q=first.get("q"),
                validation=entry.accuracy if entry else None,
                wall_s=_mean(values, "wall_s"),
                mark=marks.get((method, group_norm), ""),
                accuracies=tuple(float(x) for x in a),
                config=dict(entry.config) if entry else {},
                parameters=_size(prepared, entry.config) if entry else None,
            )  # fmt: skip
        )
    return rows


def _marks(accuracies: Mapping[tuple[str, bool], Array]) -> dict[tuple[str, bool], str]:
    """The best of a data set's methods, and those not significantly below it by tests that Holm's method corrects."""
    # the printed algorithms only claim their epsilon: they are not ranked among those that keep it
    private = {pair: a for pair, a in accuracies.items() if pair[0] in ("dp-sgd", *SOUND)}
    leader = max(private, key=lambda pair: float(np.median(private[pair])), default=None)
    if leader is None:
        return {}
    others = [pair for pair in private if pair != leader]
    tests = holm([wilcoxon_p(private[pair], private[leader]) for pair in others])
    return {leader: "best"} | {pair: "tied" if p > LEVEL else "" for pair, p in zip(others, tests, strict=True)}


def _size(prepared: Prepared, config: Mapping[str, Any]) -> int | None:
    """Parameters of a network with one hidden layer."""
    width = config.get("width")
    return None if width is None else (prepared.X.shape[1] + 1) * width + (width + 1) * prepared.classes


def judged_again(rows: Sequence[TableRow]) -> list[TableRow]:
    """Rows of earlier runs with the tests, marks and sizes of today, in the order of the tables; nothing is trained."""
    result = []
    for dataset in dict.fromkeys(r.dataset for r in rows):
        mine = {(r.method, r.group_norm): r for r in rows if r.dataset == dataset}
        accuracies, prepared = {pair: np.array(r.accuracies) for pair, r in mine.items()}, prepare(dataset)
        marks = _marks(accuracies)
        for pair, row in mine.items():
            p = _against_dp_sgd(*pair, accuracies)
            size = _size(prepared, row.config)
            result.append(replace(row, wilcoxon_p=p, mark=marks.get(pair, ""), parameters=size))
    return _ordered(result)


def _against_dp_sgd(method: str, group_norm: bool, accuracies: Mapping[tuple[str, bool], Array]) -> float | None:
    base = accuracies.get(("dp-sgd", group_norm))
    if method in ("majority", "non-private", "dp-sgd") or base is None:
        return None
    return wilcoxon_p(accuracies[method, group_norm], base)


def _ordered(rows: Iterable[TableRow]) -> list[TableRow]:
    order = {method: i for i, method in enumerate(METHODS)}
    return sorted(rows, key=lambda r: (r.dataset, order[r.method], r.group_norm))


def _mean(values: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([v[name] for v in values]))


def _pld(value: dict[str, Any], delta: float) -> float:
    return accounting.epsilon([accounting.Mechanism("gaussian", value["sigma"], value["q"], value["steps"])], delta)


@dataclass(frozen=True)
class Verdict:
    """The sound variant that validation chose, against the paper and against DP-SGD tuned with the same budget.

    Attributes:
        dataset: Data set.
        variant: The sound variant with the best validation score.
        median: Its median test accuracy.
        interval: 95% interval of its mean over seeds and test records (normal approximation).
        paper: The paper's best Lip-DP-SGD.
        above_paper: Whether the median is above it.
        baseline: DP-SGD, with or without group normalisation, whichever validation chose.
        baseline_median: Its median.
        p: Signed-rank test of the pairs.
        p_holm: The same, corrected for the number of data sets by Holm's method.
        verdict: "above", "below" or "not different" (5%, by the corrected one).
    """

    dataset: str
    variant: str
    median: float
    interval: tuple[float, float]
    paper: float
    above_paper: bool
    baseline: str
    baseline_median: float
    p: float
    p_holm: float
    verdict: str


def verdicts(rows: Sequence[TableRow], chosen: dict[str, dict[str, Chosen]]) -> list[Verdict]:
    """One verdict per data set; which variant speaks for the method was decided on validation."""
    result = []
    for dataset in dict.fromkeys(row.dataset for row in rows):
        mine = {name_of(r.method, r.group_norm): r for r in rows if r.dataset == dataset}
        known = {name: c for name, c in chosen.get(dataset, {}).items() if name in mine}
        baselines = {name: c for name, c in known.items() if parse_name(name)[0] == "dp-sgd"}
        if not baselines or not any(parse_name(name)[0] in SOUND for name in known):
            continue
        variant = best_variant(known)
        baseline = max(baselines, key=lambda name: baselines[name].score)
        a, b = np.array(mine[variant].accuracies), np.array(mine[baseline].accuracies)
        p = wilcoxon_p(a, b)
        records = len(prepare(dataset).parts.test)
        # seeds share one test part: its own sampling error is added to that of the seeds
        error = math.sqrt(a.var(ddof=1) / len(a) + a.mean() * (1 - a.mean()) / records) if len(a) > 1 else math.nan
        direction = float(np.sign((a - b).mean()))
        result.append(
            Verdict(
                dataset,
                variant,
                float(np.median(a)),
                (float(a.mean() - 1.96 * error), float(a.mean() + 1.96 * error)),
                best_lip(dataset),
                bool(np.median(a) > best_lip(dataset)),
                baseline,
                float(np.median(b)),
                p,
                p,
                "above" if direction > 0 else "below",
            )  # fmt: skip
        )
    corrected = holm([v.p for v in result])
    return [
        replace(v, p_holm=p, verdict=v.verdict if p <= LEVEL else "not different")
        for v, p in zip(result, corrected, strict=True)
    ]


def target_epsilon(dataset: str) -> float:
    """The paper's ε of a data set."""
    return printed(dataset).epsilon
