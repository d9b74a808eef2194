"""Trainers of the algorithms as printed; the flaws they keep are listed in the package's docstring."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip_studies.printed._algorithms import (
    PublishedRelease,
    Training,
    clip_weights,
    cross_entropy,
    dpsgd_step,
    lip_step,
    published_sensitivities,
)

CLAIM_NOTE = (
    "claimed epsilon: what the paper's accounting prints, not a guarantee; "
    "`weightclip audit` shows lower bounds far above it"
)


def claimed_epsilon(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str = "rdp"
) -> float:
    """The epsilon the paper would print: ``steps`` Poisson-sampled Gaussians at the claimed multiplier, by RDP.

    Formal guarantees: none for the algorithms of this module; see the flaws in the module's docstring.
    """
    from weightclip.accounting import Mechanism, epsilon

    if noise_multiplier == 0:
        return math.inf
    mechanism = Mechanism(kind="gaussian", sigma=noise_multiplier, q=sample_rate, steps=steps)
    return float(epsilon([mechanism], delta, accountant=accountant))


class _Published(ABC):
    """Poisson sampling with redrawn empty batches, the update, and the claim: common to Algorithms 1 and 2."""

    def __init__(self, model: nn.Module, noise_multiplier: float, training: Training) -> None:
        self.model, self.noise_multiplier = model, noise_multiplier
        self.batch_size = training.get("batch_size", 256)
        self.loss = training.get("loss", cross_entropy)
        self.generator = training.get("generator")
        factory = training.get("optimizer", torch.optim.Adam)
        self.optimizer = factory(model.parameters(), lr=training.get("learning_rate", 1e-3))
        self.steps = 0
        self.sample_rate: float | None = None

    @abstractmethod
    def _compute(self, inputs: Tensor, targets: Tensor) -> PublishedRelease: ...

    def _after_update(self) -> None:  # noqa: B027 (only Algorithm 1 has something to do here)
        """What follows the update: ClipWeights in Algorithm 1, nothing in Algorithm 2."""

    def sample(self, records: int) -> Tensor:
        """Poisson sampling at rate ``s / |Z|``, redrawn while empty (flaw 6)."""
        q = min(1.0, self.batch_size / records)
        while True:
            chosen = torch.rand(records, generator=self.generator) < q
            if chosen.any():
                return chosen.nonzero().flatten()

    def step(self, X: Tensor, y: Tensor, batch_indices: Tensor | None = None) -> PublishedRelease:
        """One step on the data set (X, y), with a drawn batch or the given one."""
        q = min(1.0, self.batch_size / len(X))
        if self.sample_rate not in (None, q):
            raise WeightclipError("one trainer, one data set: the claim assumes a single sampling rate")
        self.sample_rate = q
        batch = self.sample(len(X)) if batch_indices is None else batch_indices
        release = self._compute(X[batch], y[batch])
        for name, parameter in self.model.named_parameters():
            parameter.grad = release.gradients[name]
        self.optimizer.step()
        self._after_update()
        self.steps += 1
        return release

    def fit(
        self, X: Tensor, y: Tensor, *, steps: int, callback: Callable[[int, PublishedRelease], None] | None = None
    ) -> Self:
        """Run ``steps`` steps; ``callback(t, release)`` after each."""
        for t in range(steps):
            release = self.step(X, y)
            if callback is not None:
                callback(t, release)
        return self

    def claimed_epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """The claimed epsilon of all steps so far; not a guarantee."""
        if self.sample_rate is None:
            return 0.0
        return claimed_epsilon(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps,
            delta=delta,
            accountant=accountant,
        )

    def report(self, delta: float, accountant: str = "rdp") -> dict[str, Any]:
        """A JSON-able statement; the only epsilon in it is a claim."""
        return {
            "algorithm": type(self).__name__,
            "claimed_epsilon": self.claimed_epsilon(delta, accountant),
            "delta": delta,
            "accountant": accountant,
            "steps": self.steps,
            "sample_rate": self.sample_rate,
            "noise_multiplier": self.noise_multiplier,
            "note": CLAIM_NOTE,
        }


class PublishedLip(_Published):
    """Lip-DP-SGD (Algorithm 1), or Fix-Lip-DP-SGD with ``fixed=True``, exactly as printed.

    Formal guarantees: none. The printed algorithm leaks in the ways listed in the module's docstring; what it reports
    is a *claimed* epsilon.

    Args:
        model: A feed-forward chain of linear and convolutional layers and layers without parameters.
        loss_lipschitz: tau, the Lipschitz value of the loss (sqrt(2) for cross-entropy).
        weight_norm: C.
        noise_multiplier: sigma.
        p: Norm of ClipWeights: 1, 2 or ``math.inf``.
        fixed: Fix-Lip-DP-SGD.
        bjorck_iterations: Björck steps in ClipWeights (p = 2).
        power_iterations: Power iterations in ClipWeights (p = 2).
        training: See :class:`Training`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_lipschitz: float = math.sqrt(2),
        weight_norm: float = 1.0,
        noise_multiplier: float = 1.0,
        *,
        p: float = 2,
        fixed: bool = False,
        bjorck_iterations: int = 0,
        power_iterations: int = 5,
        **training: Unpack[Training],
    ) -> None:
        super().__init__(model, noise_multiplier, training)
        self.loss_lipschitz, self.weight_norm, self.p, self.fixed = loss_lipschitz, weight_norm, p, fixed
        self.bjorck_iterations, self.power_iterations = bjorck_iterations, power_iterations
        self._after_update()

    def _after_update(self) -> None:
        self.gains = clip_weights(
            self.model,
            self.weight_norm,
            self.p,
            fixed=self.fixed,
            bjorck_iterations=self.bjorck_iterations,
            power_iterations=self.power_iterations,
            generator=self.generator,
        )

    @property
    def sensitivities(self) -> dict[str, float]:
        """The claimed ``Delta_k`` at the current weights."""
        return published_sensitivities(self.gains, self.loss_lipschitz)

    def _compute(self, inputs: Tensor, targets: Tensor) -> PublishedRelease:
        return lip_step(
            self.model,
            inputs,
            targets,
            gains=self.gains,
            tau=self.loss_lipschitz,
            noise_multiplier=self.noise_multiplier,
            loss=self.loss,
            generator=self.generator,
        )


class PublishedDPSGD(_Published):
    """DP-SGD as the paper prints it (Algorithm 2): each layer clipped to C, K layers accounted as one (flaws 2, 5, 6).

    Formal guarantees: none; what it reports is a *claimed* epsilon.

    Args:
        model: Any module that ``torch.func`` can differentiate per record.
        max_gradient_norm: C.
        noise_multiplier: sigma.
        training: See :class:`Training`.
    """

    def __init__(
        self,
        model: nn.Module,
        max_gradient_norm: float = 1.0,
        noise_multiplier: float = 1.0,
        **training: Unpack[Training],
    ) -> None:
        super().__init__(model, noise_multiplier, training)
        self.max_gradient_norm = max_gradient_norm

    def _compute(self, inputs: Tensor, targets: Tensor) -> PublishedRelease:
        return dpsgd_step(
            self.model,
            inputs,
            targets,
            max_gradient_norm=self.max_gradient_norm,
            noise_multiplier=self.noise_multiplier,
            loss=self.loss,
            generator=self.generator,
        )
