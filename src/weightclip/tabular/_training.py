"""A dense network on encoded features, trained by the engine: draws, limits, noise and charges are the engine's."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from weightclip.accounting import Ledger, Mechanism, calibrate_sigma
from weightclip.certificate import Bounds
from weightclip.engine import PrivacyEngine
from weightclip.errors import ContractError, NotFinite, WeightclipError
from weightclip.losses import Loss
from weightclip.models import MLP
from weightclip.nn import ParameterAverage
from weightclip.noise import Streams
from weightclip.sampling import TAIL
from weightclip.tabular._plan import FitPlan
from weightclip.tabular._resume import Checkpoint

_PIECE = 1 << 22  # numbers of a physical batch: larger draws are handed out in pieces, so that memory stays bounded
_ROOM = 1.25  # of q n, where n is declared: a quarter more records than that show nowhere
_SAVES = 24  # times that a training is kept on its way
_INIT, _WEIGHTS, _ENGINE = "table/init", "table/weights", "table/engine"


@dataclass(frozen=True)
class Settings:
    """One way to train: architecture, optimiser and bounds, all of them public constants."""

    hidden: tuple[int, ...] = (16,)  # widths of the hidden layers; () is a linear model
    batch: int = 256  # expected size of a draw; the sampling rate is q = batch/n, n the (public) number of records
    epochs: float = 30  # passes over the data: T = epochs·round(1/q) steps
    lr: float = 0.06  # learning rate at the first step
    final_lr: float = 0.1  # learning rate at the end as a part of `lr`; it falls along a straight line
    averaging: float = 0.95  # decay of the exponential average of the weights, 0 for the last iterate
    bias_scale: float = 0.3  # β of the engine's bounds
    cap: float | None = None  # B, bound of each record's gradient at the raw outputs (Huber's δ for regression)
    temperature: float = 1.0  # τ of the loss τ·l(z/τ)
    weight_norm: float | None = None  # C, or None: ClipWeights after every step
    # t_k, one number or one per layer: one scale per record bounds its whole gradient
    joint_cap: float | tuple[float, ...] = 0.3

    def sample_rate(self, n: int) -> float:
        """q."""
        return min(1.0, self.batch / n)

    def divisor(self, n: int, declared: bool) -> float:
        """b: q n, or above it where ``n`` is declared; what rounding is allowed follows from b, not from records."""
        return min(self.batch, n) * (_ROOM if declared else 1.0)

    def steps(self, n: int) -> int:
        """T."""
        return max(1, round(self.epochs * max(1, round(1 / self.sample_rate(n)))))

    def bounds(self) -> Bounds:
        """What the engine enforces."""
        cap: Any = self.joint_cap
        if isinstance(cap, tuple):
            if len(cap) != len(self.hidden) + 1:
                raise WeightclipError(f"joint_cap has {len(cap)} values for {len(self.hidden) + 1} layers.")
            cap = {f"layers.{2 * k}": t for k, t in enumerate(cap)}
        return Bounds(joint_cap=cap, bias_scale=self.bias_scale, weight_norm=self.weight_norm)


@dataclass(frozen=True)
class Records:
    """What is private: features, labels and sample weights of every record."""

    features: Tensor  # encoded rows, float32 or float16; records x features
    labels: Tensor  # as the loss takes them; those it does not know contribute nothing
    weights: Tensor | None = None  # chance of each record to take part in a step it was drawn for, or None: always


@dataclass(frozen=True, eq=False)
class Trained:
    """One trained network and what it cost."""

    settings: Settings  # how it was trained
    weights: tuple[tuple[Tensor, Tensor], ...]  # (weight, bias) of every layer, float32, before the temperature
    sigma: float  # noise multiplier of the joint release of all layers
    q: float  # sampling rate
    steps: int  # number of releases
    batch: float  # public divisor b
    layers: tuple[dict[str, Any], ...]  # name, parameters, sensitivity and noise of every layer, JSON-ready

    @property
    def mechanism(self) -> Mechanism:
        """What the accountant has to count."""
        return Mechanism("gaussian", self.sigma, self.q, self.steps, label="noisy gradients")


@dataclass(frozen=True)
class Budget:
    """A total to be spent on one run; the noise multiplier follows from q and T."""

    epsilon: float  # target ε
    delta: float  # its δ
    accountant: str = "pld"  # "pld" or "rdp"
    extra: tuple[Mechanism, ...] = ()  # what else is released within the same budget (preprocessing)

    def sigma(self, q: float, steps: int) -> float:
        """The smallest noise multiplier that keeps the budget; draws beyond what rounding allows for cost δ."""
        return _sigma(self, q, steps)


@functools.lru_cache(maxsize=256)
def _sigma(budget: Budget, q: float, steps: int) -> float:
    left = budget.delta - TAIL * (steps + sum(m.steps for m in budget.extra if m.q < 1))
    return calibrate_sigma(budget.epsilon, left, q, steps, budget.accountant, extra_mechanisms=budget.extra)


def train(
    records: Records, outputs: int, loss: Loss, settings: Settings, plan: FitPlan,
    mechanisms: tuple[Mechanism, ...], n: int, look: Mechanism | None = None,
) -> Trained:  # fmt: skip
    """Train one network with :class:`weightclip.PrivacyEngine`.

    With a checkpoint the training is kept now and then, and taken up again. That needs a ledger: steps that were
    charged and lost are not repeated, so that the total stays what was planned.

    Args:
        plan: What was decided beforehand. The engine's own randomness is the operating system's, unless the plan's
            streams are seeded.
        mechanisms: What else counts in the budget; the ledger holds it already, but for `look`.
        n: Public number of records, from which q and T follow.
        look: What of `mechanisms` is released after the training, and charged then.

    Formal guarantees:
        Those of the engine: T Poisson-sampled Gaussian mechanisms, `Trained.mechanism`, under adding or removing one
        record, given q, b, T, the settings and the initial weights. Averages of released weights are free. With sample
        weights a record takes part with a smaller chance (`thinned`). The ledger holds what this fit has planned for
        and nothing else, or nothing is released: other runs on it would leave less than was planned with.
    """
    q, steps = settings.sample_rate(n), settings.steps(n)
    batch, divisor = min(settings.batch, n), settings.divisor(n, plan.records is not None)
    sigma = Budget(plan.epsilon, plan.delta, plan.accountant, mechanisms).sigma(q, steps)
    width = records.features.shape[1]
    model = _network(width, settings.hidden, outputs, plan.streams)
    tensors = [records.features, records.labels] + ([] if records.weights is None else [records.weights])
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True)
    engine = PrivacyEngine(plan.accountant, ledger=plan.ledger)
    first = 0 if plan.ledger is None else sum(m.steps for m in mechanisms) - (look is not None)
    looked = 0  # a look that was charged, and whose result was lost
    if plan.ledger is not None:
        looked = max(0, engine.steps - first - steps)
        if looked > (look is not None) or not _alone(engine, first, plan.checkpoint):
            raise ContractError(f"ledger {plan.ledger} was charged by another run during this fit: start again.")
    with torch.enable_grad():
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(*tensors), batch_size=batch),
            criterion=loss, noise_multiplier=sigma, bounds=settings.bounds(), sample_rate=q,
            expected_batch_size=divisor, max_physical_batch_size=_piece(batch, width), example=torch.zeros(2, width),
            generator=root_generator(plan.streams, _ENGINE),
        )  # fmt: skip
        try:
            average = ParameterAverage(model, settings.averaging)
            if plan.checkpoint is not None and plan.checkpoint.engine.exists():
                engine.load(plan.checkpoint.engine)
                plan.checkpoint.load_average(average)
            _loop(engine, average, settings, plan, first + looked, steps)
            layers = [{k: row[k] for k in ("name", "parameters", "sensitivity", "noise")}
                      for row in engine.report()["layers"]]  # fmt: skip
        finally:
            engine.detach()
    with average.apply():
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names = [f"layers.{2 * k}" for k in range(len(settings.hidden) + 1)]
    weights = tuple((state[f"{name}.weight"], state[f"{name}.bias"]) for name in names)
    return Trained(settings, weights, sigma, q, steps, divisor, tuple(layers))


def _alone(engine: PrivacyEngine, first: int, checkpoint: Checkpoint | None) -> bool:
    """Whether the ledger holds nothing but what this fit has planned for; its charges have the fit's name from here."""
    if checkpoint is None:
        return engine.steps == first
    assert isinstance(engine.ledger, Ledger)
    checkpoint.begin(engine.ledger)
    return engine.steps >= first and checkpoint.alone(engine.ledger)


def _loop(
    engine: PrivacyEngine, average: ParameterAverage, settings: Settings, plan: FitPlan, first: int, steps: int
) -> None:
    """Steps until as many were released as planned, those of interrupted runs included."""
    step, (group,) = engine.fused_step(), engine.optimizer.param_groups
    done, piece = engine.steps - first, 0
    try:
        while done < steps:
            for x, y, *weights in engine.loader:
                group["lr"] = settings.lr * (1 - (1 - settings.final_lr) * done / steps)
                if weights:
                    y = thinned(y, weights[0], plan.streams.numpy(_WEIGHTS, done, piece))
                step(x.float(), y)
                piece += 1
                if engine.steps - first == done:  # a part of a draw
                    continue
                done, piece = engine.steps - first, 0
                average.update()
                if plan.checkpoint is not None and done % max(1, steps // _SAVES) == 0:
                    engine.save(plan.checkpoint.engine)
                    plan.checkpoint.save_average(average)
                if plan.progress is not None:
                    plan.progress(done, steps)
                if done >= steps:
                    break
    except ContractError as error:
        if all(bool(torch.isfinite(p).all()) for p in engine.optimizer.param_groups[0]["params"]):
            raise
        raise NotFinite("training left the finite numbers: lower learning_rate.") from error


def thinned(labels: Tensor, weights: Tensor, rng: np.random.Generator) -> Tensor:
    """Labels of drawn records, those that stay out of this step replaced by ones that no loss knows.

    A drawn record is kept with probability w, so that it contributes w times as often and its gradient is never
    larger than without weights. Scaling gradients instead would do next to nothing: most are cut to the same norm.

    Formal guarantees:
        A record takes part in a step with probability q·w <= q, independently of all others, and contributes what the
        engine limits: the step is a Poisson-sampled Gaussian mechanism whose rate for this record is at most q, and the
        sampled mechanism's privacy loss grows with the rate. A weight that is no number keeps the record out.
    """
    kept = torch.from_numpy(rng.random(len(labels))) < weights
    return torch.where(kept, labels, math.nan if labels.is_floating_point() else UNKNOWN)


UNKNOWN = -100
"""Class index of a record that contributes nothing."""


def root_generator(streams: Streams, label: str) -> torch.Generator | None:
    """The engine's root, for experiments; None for the operating system's randomness."""
    if streams.is_secure:
        return None
    return torch.Generator().manual_seed(int.from_bytes(streams.key(label)[:8], "little"))


def _piece(batch: int, width: int) -> int | None:
    """Records of a physical batch, by public numbers; None where a whole draw is small enough."""
    size = max(1024, _PIECE // max(1, width))
    return size if 2 * batch > size else None


def _network(width: int, hidden: tuple[int, ...], outputs: int, streams: Streams) -> MLP:
    """A network with initial weights as nn.Linear has them, from a stream of its own."""
    model, rng = MLP(width, hidden, outputs).float(), streams.numpy(_INIT)
    with torch.no_grad():
        for layer in model.layers:
            if isinstance(layer, torch.nn.Linear):
                limit = 1 / math.sqrt(layer.in_features)
                for tensor in (layer.weight, layer.bias):
                    tensor.copy_(torch.from_numpy(rng.uniform(-limit, limit, tuple(tensor.shape))))
    return model
