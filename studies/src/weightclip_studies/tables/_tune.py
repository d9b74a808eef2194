"""Multi-objective search: accuracy against ε by Bayesian optimisation (qLogNEHVI), and a search that pays for itself.

The first reads validation records freely and is resumable; the second is differentially private as a whole: it runs a
random number of random trials and releases the best one only (Papernot and Steinke 2022).
"""

from __future__ import annotations

import functools
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from weightclip import accounting
from weightclip.errors import WeightclipError
from weightclip.noise import Streams
from weightclip.tabular import Drawn, OneProcess, searched_epsilon, take_part
from weightclip_studies.fast_mlp import Run

from ._paper import printed
from ._runs import compute_runs, prepare, run_key, train_one
from ._search import SEARCH_SEED
from ._space import Choice, Config, Range, Space, our_space, paper_space
from ._store import Store

SIGMA = Range(0.4, 5.0)
EPSILON_CEILING = 20.0
"""Points beyond it are of no interest: the reference point of the hypervolume."""


@dataclass(frozen=True)
class Trial:
    """One configuration with what it reached.

    Attributes:
        config: The configuration, σ included.
        accuracy: Mean validation accuracy over seeds.
        epsilon: ε at δ = 1/n.
        pareto: Whether no other trial is both more accurate and more private.
    """

    config: Config
    accuracy: float
    epsilon: float
    pareto: bool = False


def tuning_space(method: str, dataset: str, group_norm: bool, which: str) -> Space:
    """The paper's space, or ours with σ as a parameter."""
    if which == "paper":
        return paper_space(method, group_norm)
    if which != "ours":
        raise WeightclipError(f"unknown space {which!r}: choose 'ours' or 'paper'")
    ours = our_space(method, len(prepare(dataset).parts.train), group_norm)
    return Space(ours.structure, {"sigma": SIGMA, **ours.fine})


def pareto_mask(accuracy: Sequence[float], epsilon: Sequence[float]) -> list[bool]:
    """Which points no other point dominates (at least as accurate and as private, and better in one)."""
    points = list(zip(accuracy, epsilon, strict=True))
    return [
        not any((a >= a0 and e <= e0) and (a > a0 or e < e0) for a, e in points) for a0, e0 in points
    ]  # fmt: skip


def tune(
    store: Store,
    dataset: str,
    method: str,
    *,
    group_norm: bool = False,
    space: str = "ours",
    trials: int = 40,
    initial: int = 16,
    batch: int = 4,
    seeds: int = 2,
    progress: Callable[[str], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[Trial]:
    """Search accuracy against ε with qLogNEHVI; the same number of trials for every method.

    Resumable: trials are proposed from seeds and earlier results alone, so a search that was killed asks for the same
    runs again and finds them in the store; several workers on one store share the runs of a batch.

    Formal guarantees: none. The search reads validation accuracies without noise: ε is that of one run, not of the
    search. :func:`accounted_search` charges for the search.

    Args:
        store: Where runs are kept.
        dataset: Data set.
        method: A private method.
        group_norm: With group normalisation.
        space: "ours" or "paper".
        trials: Number of configurations.
        initial: Random ones (Sobol) before the model takes over.
        batch: Configurations proposed at once.
        seeds: Seeds of a configuration; accuracy is their mean.
        progress: Called with a line per batch.
        advance: Called with the number of trials of each batch.

    Returns:
        All trials, those on the Pareto front marked.
    """
    domain = tuning_space(method, dataset, group_norm, space)
    seed = zlib.crc32(f"tune/{dataset}/{method}/{group_norm}/{space}".encode())
    initial = min(initial, trials)
    done: list[Trial] = []
    points: list[np.ndarray] = []
    pending = list(_sobol(len(domain.names), initial, seed))
    while len(done) < trials:
        if not pending:
            pending = _propose(points, done, min(batch, trials - len(done)), seed + len(done))
        configs = [domain.config(u) for u in pending]
        keys = [
            run_key(dataset, method, group_norm, config, SEARCH_SEED + s, "valid")
            for config in configs
            for s in range(seeds)
        ]
        store.compute(keys, compute_runs)
        values = store.get_many(keys)
        for i, config in enumerate(configs):
            mine = [v for v in values[i * seeds : (i + 1) * seeds] if v is not None]
            done.append(Trial(config, float(np.mean([v["accuracy"] for v in mine])), float(mine[0]["epsilon"])))
        points += [domain.point(config) for config in configs]  # where the values really are, choices rounded
        pending = []
        if advance is not None:
            advance(len(configs))
        if progress is not None:
            best = max(t.accuracy for t in done)
            progress(f"{dataset} {method}: {len(done)}/{trials} trials, best accuracy {best:.4f}")
    mask = pareto_mask([t.accuracy for t in done], [t.epsilon for t in done])
    return [Trial(t.config, t.accuracy, t.epsilon, on) for t, on in zip(done, mask, strict=True)]


def _sobol(dimension: int, count: int, seed: int) -> np.ndarray:
    from torch.quasirandom import SobolEngine

    return SobolEngine(dimension, scramble=True, seed=seed).draw(count).numpy()


def _propose(points: Sequence[np.ndarray], done: Sequence[Trial], count: int, seed: int) -> list[np.ndarray]:
    """The next configurations: q log noisy expected hypervolume improvement over (accuracy, -log ε)."""
    import torch

    try:
        from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import ModelListGP, SingleTaskGP
        from botorch.models.transforms import Standardize
        from botorch.optim import optimize_acqf
        from botorch.sampling import SobolQMCNormalSampler
        from gpytorch.mlls import SumMarginalLogLikelihood
    except ImportError as error:
        raise WeightclipError("the search needs BoTorch: pip install -e studies") from error

    X = torch.tensor(np.array(points), dtype=torch.float64)
    Y = torch.tensor([[t.accuracy, -math.log(max(t.epsilon, 1e-3))] for t in done], dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BoTorch retries ill-conditioned fits by itself and says so
        torch.manual_seed(seed)
        models = [SingleTaskGP(X, Y[:, i : i + 1], outcome_transform=Standardize(1)) for i in range(2)]
        model = ModelListGP(*models)
        fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
        floor = [float(Y[:, 0].quantile(0.25)), -math.log(EPSILON_CEILING)]
        acquisition = qLogNoisyExpectedHypervolumeImprovement(
            model=model, ref_point=floor, X_baseline=X, prune_baseline=True,
            sampler=SobolQMCNormalSampler(torch.Size([32]), seed=seed),
        )  # fmt: skip
        bounds = torch.stack([torch.zeros(X.shape[1]), torch.ones(X.shape[1])]).double()
        found, _ = optimize_acqf(
            acquisition, bounds, q=count, num_restarts=2, raw_samples=32, sequential=True, options={"maxiter": 40}
        )
    return [u for u in found.clamp(0, 1 - 1e-9).numpy()]


@dataclass(frozen=True, eq=False)
class Accounted:
    """The one thing that an accounted search releases: its winner.

    Neither the number of runs nor anything about the others is kept: that is what the guarantee rests on.

    Attributes:
        config: The released configuration.
        score: Its released, noisy validation accuracy.
        weights: (weight, bias) of every layer of the winner's model; they multiply the projected input.
        epsilon: Total ε of the search *and* the released model, at ``delta``.
        delta: δ.
        run_epsilon: ε of one run alone, its noisy score included.
        mean_runs: Mean of the random number of runs.
        score_sigma: Noise multiplier of the score's count of right answers.
        covered: What ε covers.
        secure: Whether all randomness came from the operating system.
    """

    config: Config
    score: float
    weights: tuple[tuple[np.ndarray, np.ndarray], ...]
    epsilon: float
    delta: float
    run_epsilon: float
    mean_runs: float
    score_sigma: float
    covered: str
    secure: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values, all but the weights."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "weights"}

    def tensors(self) -> dict[str, np.ndarray]:
        """The winner's weights by name."""
        names = ("weight", "bias")
        return {f"layers.{k}.{n}": v for k, layer in enumerate(self.weights) for n, v in zip(names, layer, strict=True)}


def accounted_search(
    dataset: str,
    method: str,
    *,
    group_norm: bool = False,
    total_epsilon: float | None = None,
    mean_runs: float = 10.0,
    score_sigma: float = 10.0,
    steps_like: Config | None = None,
    seed: int | None = None,
) -> Accounted:
    """A search whose *total* ε is the target: a geometric number of random trials, the best released.

    Each run draws its candidate at random from the space, trains at the run's own budget and scores itself by a noisy
    count of right validation answers; only the best run is released. Batches and epochs are fixed (they decide the
    cost of a run, which must be the same for all candidates).

    Formal guarantees:
        (epsilon, delta)-DP as a whole under adding or removing one record of the training or the validation part, by
        Papernot and Steinke (2022) through `accounting.search_cost`: the number of runs follows a law fixed beforehand
        and is told to nobody, candidates are independent of the data, and nothing of a run that did not win is shown
        or kept. Sums are formed in float64, their rounding is inside the noise scales (SOUNDNESS section 6). Feature
        statistics taken from the data are not covered, nor is the time the search takes, which tells of the number of
        runs. Randomness has 256 bits from the operating system; with ``seed`` the draws repeat, and the guarantee
        holds only while the seed stays secret.

    Args:
        dataset: Data set.
        method: A sound method or "dp-sgd"; the printed ones have no guarantee to spend.
        group_norm: With group normalisation.
        total_epsilon: Target for everything; the paper's ε by default.
        mean_runs: Mean number of runs.
        score_sigma: Noise multiplier of the validation count.
        steps_like: Configuration that fixes width, batches and epochs; 16, 8 and 8 by default.
        seed: For experiments that must repeat.
    """
    from ._space import PRINTED_METHODS, PRIVATE

    if method not in PRIVATE or method in PRINTED_METHODS:
        raise WeightclipError(f"an accounted search needs a method with a guarantee, not {method!r}")
    if not mean_runs > 1:
        raise WeightclipError(f"mean_runs must be above 1, got {mean_runs}")
    prepared = prepare(dataset)
    n, delta = len(prepared.parts.train), prepared.delta
    target = printed(dataset).epsilon if total_epsilon is None else total_epsilon
    fixed = {
        name: (steps_like or {}).get(name, value) for name, value in (("width", 16), ("batches", 8), ("epochs", 8))
    }
    space = our_space(method, n, group_norm)
    free = Space({k: Choice((fixed.get(k, v.values[0]),)) for k, v in space.structure.items()}, space.fine)
    batch = max(1, round(n / fixed["batches"]))
    q = batch / n
    steps = max(1, round(fixed["epochs"] * max(1, round(1 / q))))
    sigma, total, alone = _noise(target, delta, q, steps, mean_runs, score_sigma)
    root = Streams.secure() if seed is None else Streams.seeded(seed)
    valid = len(prepared.parts.valid)

    def one(streams: Streams, rng: np.random.Generator) -> tuple[float, tuple[Config, Run]]:
        config = {**free.config(rng.uniform(size=len(free.names))), "sigma": sigma}
        run, right = train_one(prepared, method, group_norm, config, streams)
        return (right + score_sigma * float(rng.standard_normal())) / valid, (config, run)

    board = OneProcess(Drawn.draw(root, mean_runs))
    take_part(one, root, board)
    score, (config, winner) = board.best()
    return Accounted(
        config=config,
        score=score,
        weights=tuple((w.numpy(), b.numpy()) for w, b in winner.weights),
        epsilon=total,
        delta=delta,
        run_epsilon=alone,
        mean_runs=mean_runs,
        score_sigma=score_sigma,
        covered=f"search, validation and the released model (add or remove one record); {prepared.covered}",
        secure=root.is_secure,
    )


@functools.lru_cache(maxsize=64)
def _noise(
    target: float, delta: float, q: float, steps: int, mean_runs: float, score_sigma: float
) -> tuple[float, float, float]:
    """Noise multiplier of a run, ε of search and release together (at most the target), ε of one run alone."""
    count = accounting.Mechanism("gaussian", score_sigma, 1.0, 1, label="noisy validation count")

    def mechanisms(sigma: float) -> list[accounting.Mechanism]:
        return [accounting.Mechanism("gaussian", sigma, q, steps, label="noisy gradients"), count]

    def total(sigma: float) -> float:
        return searched_epsilon(mechanisms(sigma), delta, mean_runs, target)

    low, high = 0.3, 1000.0
    if total(high) > target:
        raise WeightclipError(
            f"no training noise brings the search below ε = {target:g}: raise the target or score_sigma"
        )
    while high / low > 1.002:  # σ for which search and release together cost the target
        middle = math.sqrt(low * high)
        low, high = (middle, high) if total(middle) > target else (low, middle)
    return high, total(high), accounting.epsilon(mechanisms(high), delta, "rdp")


def plot_pareto(path: str | Path, fronts: Mapping[str, Sequence[Trial]], title: str = "") -> Path:
    """Every trial a dot, the Pareto front of each method a staircase."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ._output import COLOURS

    figure = Figure(figsize=(7.6, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, trials in fronts.items():
        colour = COLOURS.get(name.split("+")[0].split(" ")[0], "#1f5fa8")
        axis.scatter([t.epsilon for t in trials], [t.accuracy for t in trials], s=12, color=colour, alpha=0.35)
        front = sorted((t.epsilon, t.accuracy) for t in trials if t.pareto)
        if front:
            axis.step(*zip(*front, strict=True), where="post", color=colour, linewidth=2, marker="o", markersize=4,
                      label=f"{name} ({len(trials)} trials)")  # fmt: skip
    axis.set_xscale("log")
    axis.set(xlabel="ε at δ = 1/n", ylabel="validation accuracy", title=title)
    best = sorted((t.accuracy for trials in fronts.values() for t in trials), reverse=True)
    if best:
        low = np.quantile(best, 0.3)
        axis.set_ylim(float(low), best[0] + 0.08 * (best[0] - float(low)) + 1e-3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#eceef1", linewidth=0.7)
    axis.legend(frameon=False, loc="lower right")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    return Path(path)
