"""Training functions of the user's own: each run is one private training and a noisy score."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.util
import io
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from weightclip.accounting import Adjacency, Mechanism, epsilon
from weightclip.engine import PrivacyEngine, model_card, one_line
from weightclip.errors import NotFinite, WeightclipError
from weightclip.noise import Streams
from weightclip.sampling import TAIL
from weightclip.search._shared import streams
from weightclip.search._storage import Agreed, SharedBoard, as_text
from weightclip.tabular import Board, Door, Drawn, OneProcess, check_budget, release, searched_epsilon, take_part

VALIDATION = 0.2  # probability with which SearchRun.split sends a record to validation


class SearchRun:
    """One run of a search, as a training function sees it.

    The function draws its settings (:meth:`uniform`, :meth:`choice`), splits its records (:meth:`split`), makes its
    training private (:meth:`make_private`), trains until the loader ends, and returns its score: a number to which each
    validation record adds between 0 and 1, such as how many are classified rightly. The search takes the weights of the
    model from here, and adds noise to the score; a function must keep, print and log nothing.

    Attributes:
        settings: What was drawn so far, by name.
        noise_multiplier, sample_rate, steps: Those of every run.
        engine: The engine of this run.
    """

    def __init__(self, plan: FunctionSearch, agreed: Agreed, own: Streams, rng: np.random.Generator) -> None:
        self.settings: dict[str, Any] = {}
        self.noise_multiplier, self.sample_rate, self.steps = agreed.cost, plan.sample_rate, plan.steps
        self.engine = PrivacyEngine("rdp")
        self._drawn, self._own, self._rng = agreed.drawn, own, rng

    def uniform(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """A number between `low` and `high`, even in the number or in its logarithm."""
        if not (math.isfinite(low) and math.isfinite(high) and low < high and (low > 0 or not log)):
            raise WeightclipError(f"run.uniform({name!r}): low < high needed (above 0 with log), got {low}, {high}.")
        part = float(self._rng.uniform())
        return self._keep(name, low * (high / low) ** part if log else low + (high - low) * part)

    def choice(self, name: str, values: Sequence[Any]) -> Any:
        """One of some values (numbers, strings, booleans)."""
        if not values:
            raise WeightclipError(f"run.choice({name!r}): nothing to choose from.")
        return self._keep(name, values[int(self._rng.integers(len(values)))])

    def split(self, n: int) -> tuple[list[int], list[int]]:
        """Indices of training and validation records, the same in every run.

        Formal guarantees:
            Each record has a coin of its own, drawn without looking at any: a neighbouring data set is split alike.
        """
        held = self._drawn.coins(n) < VALIDATION
        return np.flatnonzero(~held).tolist(), np.flatnonzero(held).tolist()

    def make_private(self, **arguments: Any) -> tuple[Any, ...]:
        """`PrivacyEngine.make_private` with the noise, sampling rate and number of steps that were paid for."""
        fixed = {"noise_multiplier", "sample_rate", "generator", "adjacency", "mechanism"} & set(arguments)
        if fixed:
            raise WeightclipError(f"run.make_private: {min(fixed)} is the search's to set: leave it out.")
        if not self._own.is_secure:
            arguments["generator"] = torch.Generator().manual_seed(self._own.seeds("tune/engine")[0] >> 1)
        made = self.engine.make_private(
            noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate, **arguments
        )
        self.engine.budget = self.steps
        return made

    @property
    def passes(self) -> int:
        """Passes over the loader that it takes to make all steps."""
        return -(-self.steps // max(1, round(1 / self.sample_rate)))

    def _keep(self, name: str, value: Any) -> Any:
        if name in self.settings:
            raise WeightclipError(f"a run draws {name!r} twice: each setting has a name of its own.")
        self.settings[name] = value
        return value


@dataclass(frozen=True)
class FunctionSearch:
    """A search over a training function, decided before a record is read.

    Formal guarantees:
        What :meth:`search` returns is (report epsilon, delta)-DP under adding or removing one record by SOUNDNESS
        Theorem 4, if the function uses the records for nothing but `SearchRun.make_private`'s loader and a score that
        one record moves by at most 1. That every run released no more than was paid for is checked.
    """

    #: ``path.py:function``, or the function itself (which other processes cannot be sent)
    place: str | Callable[[SearchRun], float]
    epsilon: float  #: budget of the whole search and the model it releases
    delta: float  #: of that budget
    sample_rate: float  #: probability q with which a record is in a draw
    steps: int  #: most releases of one run
    mean_runs: float = 10.0  #: mean of the geometric number of runs
    score_sigma: float = 10.0  #: standard deviation of the noise on a run's score, in records
    seed: int | None = None  #: for experiments only; None: randomness of the operating system

    def __post_init__(self) -> None:
        check_budget(self.epsilon, self.delta, "epsilon", "delta")
        if not 0 < self.sample_rate < 1:
            raise WeightclipError(f"the sampling rate must lie strictly between 0 and 1, got {self.sample_rate:g}.")
        if not 1 <= self.steps <= 10**9:
            raise WeightclipError(f"the number of steps must be at least 1, got {self.steps}.")
        if not 1 < self.mean_runs <= 1e4:
            raise WeightclipError(f"the mean number of runs must lie above 1 (at most 10,000), got {self.mean_runs:g}.")
        if not 0 < self.score_sigma < math.inf:
            raise WeightclipError(f"the noise of the score must be a positive number, got {self.score_sigma:g}.")

    def search(self, board: SharedBoard | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and report of the run that won, on a shared board (`shared_search`) or in this process alone."""
        root = streams(self.seed)
        if board is None:
            agreed = Agreed(self.settings(), Drawn.draw(root, self.mean_runs), self.cost())
            runs: Board = OneProcess(agreed.drawn)
        else:
            agreed, runs = board.agreed, board
        take_part(self.run(agreed), root, runs)
        score, (weights, report) = runs.best()
        return weights, self._report(report, score)

    # -- what a shared search asks for -------------------------------------------------------------------------------

    def settings(self) -> str:
        """Everything that decides about a run; the function's file, but not the records it reads."""
        source = b""
        if isinstance(self.place, str):
            with contextlib.suppress(OSError):
                source = Path(self.place.rpartition(":")[0]).read_bytes()
        digest = hashlib.sha256(source).hexdigest()
        return as_text(**{k: v for k, v in self.__dict__.items() if k != "place"}, source=digest)

    def cost(self) -> float:
        """The least noise multiplier, to one part in a thousand, at which the whole search costs epsilon."""
        return _least_noise(self.epsilon, self.delta, self.sample_rate, self.steps, self.mean_runs, self.score_sigma)

    def run(self, agreed: Agreed) -> Callable[..., tuple[float, Any]]:
        """One run of the function."""
        train = load_function(self.place) if isinstance(self.place, str) else self.place

        def one(own: Streams, rng: np.random.Generator) -> tuple[float, Any]:
            run = SearchRun(self, agreed, own, rng)
            with _unseen(), torch.random.fork_rng():
                torch.manual_seed(own.seeds("tune/weights")[0])  # the function makes its first weights here
                score = _number(train(run))
            weights, report = self._released(run, agreed)
            noisy = release(np.array([score]), 1, self.score_sigma, Door(own), "tune/score")
            return float(noisy[0]), (weights, report)

        return one

    def encode(self, result: Any) -> Any:
        """Weights and report as JSON-ready values."""
        weights, report = result
        return {"weights": base64.b64encode(safetensors.torch.save(weights)).decode(), "report": report}

    def decode(self, stored: Any) -> Any:
        """Weights and report."""
        return safetensors.torch.load(base64.b64decode(stored["weights"])), stored["report"]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _released(self, run: SearchRun, agreed: Agreed) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and report of a run, if it released what was paid for and no more."""
        engine = run.engine
        if engine.model is None:
            raise WeightclipError("the training function never called run.make_private: nothing it does is private.")
        for m in engine.mechanisms():
            paid = m.kind == "gaussian" and m.q <= self.sample_rate and m.steps <= self.steps
            if not paid or m.sigma is None or m.sigma < agreed.cost or engine.adjacency != Adjacency.ADD_OR_REMOVE_ONE:
                raise WeightclipError("a run released more than was paid for: train with what run.make_private gives.")
        report = engine.report(self.delta)
        model = engine.detach() if engine.training.handles else engine.model
        weights = {name: t.detach().cpu().clone().contiguous() for name, t in model.state_dict().items()}
        return weights, {**report, "settings": run.settings}

    def _report(self, run: dict[str, Any], score: float) -> dict[str, Any]:
        """The report of the whole search, from that of the run that won; a run counts as if it had made all steps."""
        sigma = run["public"]["noise_multiplier"]
        mechanisms = _one_run(sigma, self.sample_rate, self.steps, self.score_sigma)
        total = searched_epsilon(mechanisms, self.delta, self.mean_runs, self.epsilon)
        if total > self.epsilon:
            raise WeightclipError("the search cost more than its budget; this is a bug, please report it.")
        entries = [{**m.to_json(), "epsilon": epsilon([m], self.delta - m.steps * TAIL, "rdp")} for m in mechanisms]
        how_long = "how long the search took, and how busy its processes were: both tell of the number of runs"
        inside = "whatever the training function did with the records beside the private loader and its score"
        same = "that records, and modules the function imports, were the same in all runs, should the search be resumed"
        return {
            **run, "accountant": "rdp", "mechanisms": entries, "epsilon": total, "target_epsilon": self.epsilon,
            "statement": f"({total:.4g}, {self.delta:g})-differentially private for adding or removing one record.",
            "search": {"mean_runs": self.mean_runs, "score": score},
            "not_covered": [*run["not_covered"], how_long, inside, same],
        }  # fmt: skip


def _one_run(sigma: float, q: float, steps: int, score_sigma: float) -> list[Mechanism]:
    """What one run releases."""
    gradients = Mechanism("gaussian", sigma, q, steps, label="noisy gradients")
    return [gradients, Mechanism("gaussian", score_sigma, 1.0, 1, label="noisy score of a run")]


@functools.lru_cache(maxsize=64)
def _least_noise(target: float, delta: float, q: float, steps: int, mean_runs: float, score_sigma: float) -> float:
    def total(sigma: float) -> float:
        return searched_epsilon(_one_run(sigma, q, steps, score_sigma), delta, mean_runs, target)

    low, high = 0.1, 1e4
    if total(high) > target:
        raise WeightclipError(
            f"no noise brings a search of {mean_runs:g} runs on average below epsilon {target:g}: raise epsilon or the "
            "noise of the score, or search less."
        )
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if total(middle) > target else (low, middle)
    return high


def network_card(report: dict[str, Any]) -> str:
    """The model card of a network that a search found: its report, with the settings it was trained with."""
    return model_card(report, facts=[f"{one_line(str(k))} = {one_line(str(v))}" for k, v in report["settings"].items()])


def load_function(place: str) -> Callable[[SearchRun], Any]:
    """The function at ``path.py:function``."""
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise WeightclipError(f"{place}: expected path.py:function, and there is no Python file {path!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # where its own classes are looked up
    sys.path.insert(0, str(Path(path).absolute().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    found = getattr(module, name, None)
    if not callable(found):
        raise WeightclipError(f"{path} has no function {name!r}.")
    return found


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """What a run prints, or is warned of, would be a look at it: only the run that wins may be seen."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _number(score: Any) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise NotFinite("the training function must return its score: one finite number.")
    return value
