"""Choosing settings on validation: the same number of trials for every method, nothing computed twice.

The search of the tables has one objective (the budget ε is fixed by the paper's table): random trials, then trials
around the best, then the finalists again with fresh seeds. The multi-objective search is in ``_tune``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ._runs import compute_runs, prepare, run_key
from ._space import SOUND, Config, Space, our_space
from ._store import Store

SEARCH_SEED, FINAL_SEED = 1000, 2000
"""First seeds of trials and of finalists; the tables use 0, 1, 2, ... and share none with them."""


@dataclass(frozen=True)
class Effort:
    """How much is tried, the same for every method.

    Attributes:
        structures: Structures (the space's designs, the same for every method), each with ``each`` random trials.
        rounds: Rounds of refinement.
        parents: Good trials that get ``each`` neighbours in a round.
        each: Trials that share a structure.
        seeds: Seeds of a trial on small tables (fewer than 5,000 training records), where validation is noisy.
        large_seeds: Seeds of a trial on the others.
        finalists: Trials that are run again with ``final_seeds`` fresh seeds; the best of them is chosen.
        final_seeds: Seeds of a finalist.
    """

    structures: int = 4
    rounds: int = 3
    parents: int = 1
    each: int = 8
    seeds: int = 4
    large_seeds: int = 1
    finalists: int = 3
    final_seeds: int = 6

    @property
    def trials(self) -> int:
        """Configurations tried in all."""
        return self.each * (self.structures + self.rounds * self.parents)


GROUPED = Effort(structures=0, rounds=0, parents=2)
"""With group normalisation: around what was chosen without it, with groups and α free; the same for every method."""

QUICK = Effort(structures=2, rounds=1, parents=1, each=2, seeds=2, large_seeds=1, finalists=2, final_seeds=2)


@dataclass(frozen=True)
class Chosen:
    """What a search chose.

    Attributes:
        config: The configuration.
        accuracy: Its mean validation accuracy over the finalists' seeds.
        auc: Mean area under the curve there.
        score: What was maximised.
        trials: Configurations tried.
        runs: Runs made in all.
    """

    config: Config
    accuracy: float
    auc: float
    score: float
    trials: int
    runs: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def score(values: Sequence[dict[str, Any]]) -> float:
    """Mean accuracy, plus a tenth of the mean AUC: on small validation parts many trials tie in accuracy."""
    return float(np.mean([v["accuracy"] for v in values]) + 0.1 * np.mean([v["auc"] for v in values]))


def search(
    store: Store,
    dataset: str,
    method: str,
    group_norm: bool = False,
    budget: Effort | None = None,
    *,
    space: Space | None = None,
    start: Config | None = None,
    encoding: str = "from-data",
    progress: Callable[[str], None] | None = None,
) -> Chosen:
    """Choose a configuration of one method for one data set on its validation part.

    Every draw follows from the names and from earlier results, so a search that was killed continues where it was:
    it asks for the same runs again and finds them in the store. With ``start`` only its neighbourhood is searched, as
    many stacks of trials as the budget has parents.

    Formal guarantees: none for the choice. It reads the validation records freely; what it costs to choose is not part
    of the ε of the tables (as in the paper). ``weightclip tune --accounted`` charges for it.
    """
    budget = budget or Effort()
    records = len(prepare(dataset, encoding).parts.train)
    space = space or our_space(method, records, group_norm)
    rng = np.random.default_rng(zlib.crc32(f"{dataset}/{method}/{group_norm}/{encoding}".encode()))
    tried: list[tuple[float, Config]] = []
    trial_seeds = budget.seeds if records < 5000 else budget.large_seeds

    def run(configs: Sequence[Config], first_seed: int, seeds: int) -> list[list[dict[str, Any]]]:
        wanted = range(first_seed, first_seed + seeds)
        keys = [
            run_key(dataset, method, group_norm, config, seed, "valid", encoding=encoding)
            for config in configs
            for seed in wanted
        ]
        store.compute(keys, compute_runs)
        values = store.get_many(keys)
        return [[v for v in values[i : i + seeds] if v is not None] for i in range(0, len(values), seeds)]

    def attempt(configs: list[Config]) -> None:
        for config, values in zip(configs, run(configs, SEARCH_SEED, trial_seeds), strict=True):
            tried.append((score(values), config))
        if progress is not None:
            progress(f"{dataset} {method}{' +gn' if group_norm else ''}: {len(tried)} trials, best {max_score():.4f}")

    def max_score() -> float:
        return max(s for s, _ in tried)

    if start is not None:
        for _ in range(budget.parents):
            shape = {name: part.at(rng.uniform()) for name, part in space.structure.items()}
            drawn = space.nearby(rng, start, budget.each)
            attempt([{**space.config(rng.uniform(size=len(space.names))), **shape, **config} for config in drawn])
    if budget.structures:
        attempt(space.sample(rng, budget.structures, budget.each))
    for _ in range(budget.rounds if start is None else 0):
        best = sorted(tried, key=lambda item: -item[0])[: budget.parents]
        attempt([c for _, parent in best for c in space.nearby(rng, parent, budget.each)])
    finalists = [config for _, config in sorted(tried, key=lambda item: -item[0])[: budget.finalists]]
    results = run(finalists, FINAL_SEED, budget.final_seeds)
    place = int(np.argmax([score(values) for values in results]))
    values = results[place]
    runs = len(tried) * trial_seeds + len(finalists) * budget.final_seeds
    return Chosen(
        config=finalists[place],
        accuracy=float(np.mean([v["accuracy"] for v in values])),
        auc=float(np.mean([v["auc"] for v in values])),
        score=score(values),
        trials=len(tried),
        runs=runs,
    )


def best_variant(chosen: dict[str, Chosen]) -> str:
    """The sound variant with the best validation score; keys are "method" or "method+gn"."""
    sound = {name: c for name, c in chosen.items() if name.removesuffix("+gn") in SOUND}
    return max(sound, key=lambda name: sound[name].score)
