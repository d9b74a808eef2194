"""What is audited: a trainer that can be started on any data set, and one run of it, step by step.

Everything goes through the real :class:`weightclip.PrivacyEngine` and the ordinary training loop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weightclip._torch import drop_forward_hooks
from weightclip.certificate import Bounds
from weightclip.engine import PrivacyEngine
from weightclip.errors import WeightclipError
from weightclip.factors import make_layer_plain
from weightclip.losses import Loss, recognise
from weightclip.noise import Allocation, Equal, quantile_adjusted_sigma

Records = tuple[Tensor, Tensor]
"""Inputs and labels, records on dimension 0."""


TOLERANCE = 1e-6
"""By how much rounding may exceed what is allowed, relative."""


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Gradient descent with small steps: noise in proportion to growing weights would let them explode."""
    return torch.optim.SGD(parameters, lr=0.02)


def frozen_sgd(parameters: Any) -> torch.optim.Optimizer:
    """An optimiser that leaves the weights where they are, so that steps can be repeated."""
    return torch.optim.SGD(parameters, lr=0.0)


@dataclass(frozen=True)
class Subject:
    """A trainer to audit: all that is public about a run, so that it can be started on any data set."""

    name: str  #: for reports
    model: Callable[[], nn.Module]  #: makes the model; the same initial weights every time
    criterion: Any  #: what the user would pass to the engine
    bounds: Bounds  #: what is enforced
    #: ``records(n, generator)``: ordinary records, for backgrounds and typical ratios
    records: Callable[[int, torch.Generator], Records]
    batch: float = 8.0  #: b, the public divisor
    rate: float = 1.0  #: q
    physical: int | None = None  #: ``max_physical_batch_size``
    allocation: Allocation = field(default_factory=Equal)  #: how noise is spread
    optimizer: Callable[[Any], torch.optim.Optimizer] = plain_sgd  #: makes the optimiser
    autocast: torch.dtype | None = None  #: type of ``torch.autocast`` in the forward, or None
    views: int = 1  #: augmentation multiplicity; view m of a record is (1 + m) times its input
    mechanism: Any = None  #: None for the Gaussian

    @classmethod
    def of(cls, engine: PrivacyEngine, name: str = "model") -> Subject:
        """The trainer behind an engine: its model (as it is now), loss and bounds; records are drawn from its data."""
        if engine.model is None:
            raise WeightclipError("this engine has no model yet: call make_private first.")
        frozen = plain_copy(engine.model)
        data = engine.loader.dataset

        def records(n: int, generator: torch.Generator) -> Records:
            chosen = torch.randint(len(data), (n,), generator=generator).tolist()  # type: ignore[arg-type]
            columns = zip(*(data[i] for i in chosen), strict=True)
            x, y = (torch.stack([torch.as_tensor(v) for v in column]) for column in columns)
            return x, y

        return cls(
            name, lambda: copy.deepcopy(frozen), engine.criterion.native, engine.bounds, records,
            engine.expected_batch_size, engine.loader.sample_rate, engine.loader.piece_size,
            engine.training.release.allocation,
        )  # fmt: skip

    @property
    def loss(self) -> Loss:
        """The recognised loss."""
        return recognise(self.criterion)

    def ordinary(self, n: int, seed: int = 0) -> Records:
        """Ordinary records from a seed."""
        return self.records(n, torch.Generator().manual_seed(seed))

    def start(self, data: Records, sigma: float, seed: int = 0, unit: float | None = None, **changes: Any) -> AuditRun:
        """Start the trainer on a data set with multiplier ``sigma``; ``unit`` is the sigma that sets the units."""
        return AuditRun(replace(self, **changes), data, sigma, seed, unit or sigma or 1.0)


class AuditRun:
    """One training run of a subject through the real engine, one release at a time.

    Releases are read from ``p.grad`` after ``step()``, as any observer could, and shown in *units*: coordinate j of
    layer k times b (and beta for biases) over s_k/sigma, where s_k is what the engine says it adds. In these units one
    record may move the release by at most 1 and the noise is N(0, sigma^2 I). Where limits follow private quantiles,
    the noisy counts (read off the moves of the limits) are further coordinates of the same release; how the budget is
    split then depends on sigma, so that a noiseless twin has to know it (``unit``).
    """

    def __init__(self, subject: Subject, data: Records, sigma: float, seed: int, unit: float) -> None:
        self.subject, self.sigma, self.unit = subject, sigma, unit
        self.x, self.y = (t.clone() for t in data)
        self.engine = PrivacyEngine()
        loader = DataLoader(TensorDataset(self.x, self.y), batch_size=max(1, round(subject.batch)))
        model = subject.model()
        self.model, self.optimizer, self.loader, self.criterion = self.engine.make_private(
            module=model, optimizer=subject.optimizer(model.parameters()), data_loader=loader,
            criterion=subject.criterion, noise_multiplier=sigma, bounds=subject.bounds, sample_rate=subject.rate,
            expected_batch_size=subject.batch, max_physical_batch_size=subject.physical,
            generator=torch.Generator().manual_seed(seed), allocation=subject.allocation,
            augmentation_multiplicity=subject.views, mechanism=subject.mechanism,
        )  # fmt: skip
        release = self.engine.training.release
        # gradients of effective weights as they are released, before they are pulled back to the parameters
        release.blocks = [replace(b, pull_back=None) for b in release.blocks]
        self._quantiles = self.engine.training.quantiles
        self._limits = [] if self._quantiles is None else self._quantiles.limits()
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def step(self) -> Tensor:
        """Train on the next draw, all its pieces; returns the release in units (float64, one flat vector)."""
        if self._quantiles is not None:
            self._before = self._quantiles.state()
        while True:
            x, y = next(self._batches)
            if self.subject.views > 1:
                x = torch.stack([(1 + m) * x for m in range(self.subject.views)], 1).flatten(0, 1)
            self.optimizer.zero_grad()
            kind = self.subject.autocast
            with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
                loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            info = self.engine.training.info
            if info is None or info.last:
                return self.released()

    def raw_step(self) -> Tensor:
        """As :meth:`step`, but the release times b without units: the sum itself where there is no noise."""
        self.step()
        return self.subject.batch * torch.cat([_gradient(b) for b in self.engine.training.release.blocks])

    def released(self) -> Tensor:
        """The last release in units."""
        blocks, units = self.engine.training.release.blocks, self.block_units()
        parts = [_gradient(b) * (self.subject.batch * b.beta / u) for b, u in zip(blocks, units, strict=True)]
        if self._quantiles is not None:
            parts.append(self._counts())
        return torch.cat(parts)

    def _counts(self) -> Tensor:
        """The noisy sums of centred indicators behind the last moves of the limits, in units of sigma_b/sigma."""
        q = self._quantiles
        assert q is not None
        now = q.state()
        moves = [math.log(now[path][i] / self._before[path][i]) for path, i in q.queries]
        shares = q.settings.quantile - torch.tensor(moves, dtype=torch.float64) / q.settings.rate
        return (shares - 0.5) * q.batch * (self.unit / q.sigma_b)

    def layer_units(self) -> list[float]:
        """s_k/sigma of each layer, as the engine computed them for the last step."""
        units, q = units_of(self.engine, self.engine.training.sensitivity.values), self._quantiles
        if q is None:
            return units
        share = quantile_adjusted_sigma(self.unit, len(q.queries), q.sigma_b) / self.unit  # of the budget
        return [share * u for u in units]

    def block_units(self) -> list[float]:
        """The unit of each parameter's coordinates."""
        units = self.layer_units()
        return [units[block.layer] for block in self.engine.training.release.blocks]

    def layer_norms(self, release: Tensor) -> dict[str, float]:
        """Per layer, the l2 norm (in the sum over records, bias times beta) of a vector given in units."""
        return norms_of_layers(self.engine, release, self.layer_units())

    def weights(self) -> list[Tensor]:
        """A copy of the trained parameters, and of limits that follow quantiles."""
        return [t.detach().clone() for t in self._state()]

    def _state(self) -> list[Tensor]:
        return [*(b.parameter for b in self.engine.training.release.blocks), *self._limits]

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Overwrite what :meth:`weights` gave."""
        for tensor, value in zip(self._state(), weights, strict=True):
            tensor.copy_(value)

    def replace(self, data: Records) -> None:
        """Put other records of the same shapes into the data set."""
        self.x.copy_(data[0])
        self.y.copy_(data[1])


def _gradient(block: Any) -> Tensor:
    """What was released of one parameter; zeros where nothing was."""
    parameter = block.parameter
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach().double().flatten()


def units_of(engine: PrivacyEngine, sensitivities: Tensor) -> list[float]:
    """s_k/sigma of each layer, as the engine allots them."""
    release = engine.training.release
    before, release.sigma = release.sigma, 1.0
    try:
        return release.scales(sensitivities).tolist()
    finally:
        release.sigma = before


def norms_of_layers(engine: PrivacyEngine, release: Tensor, units: list[float]) -> dict[str, float]:
    """Per layer, the l2 norm (in the sum over records, bias times beta) of a vector given in these units."""
    blocks = engine.training.release.blocks
    sizes = [b.parameter.numel() for b in blocks]
    squares = [0.0] * len(units)
    for block, part in zip(blocks, release[: sum(sizes)].split(sizes), strict=True):
        squares[block.layer] += float(part.square().sum())
    return {path: s**0.5 * u for path, s, u in zip(engine.plan.layers, squares, units, strict=True)}


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of a private model without its engine: native layers, no hooks of ours."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        drop_forward_hooks(module, lambda hook: getattr(hook, "_weightclip", False))
        make_layer_plain(module)
    return twin


def joined(data: Records, *more: Records) -> Records:
    """Several sets of records as one, in order."""
    return torch.cat([data[0], *(m[0] for m in more)]), torch.cat([data[1], *(m[1] for m in more)])


def repeated(record: Records, n: int) -> Records:
    """n copies of one record (or of a few, cyclically)."""
    times = -(-n // len(record[0]))
    return torch.cat([record[0]] * times)[:n], torch.cat([record[1]] * times)[:n]
