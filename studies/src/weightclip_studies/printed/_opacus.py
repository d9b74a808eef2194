"""DP-SGD as practitioners run it, through Opacus; the public door is :mod:`weightclip_studies.printed`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any, Self, Unpack, cast

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip_studies.printed._algorithms import Training, cross_entropy


class _Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Two tensors as a data set whose batches are gathered by one indexing each, instead of record by record."""

    def __init__(self, X: Tensor, y: Tensor) -> None:
        self.X, self.y = X, y

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.X[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def collate(self, indices: list[int]) -> list[Tensor]:
        return [self.X[indices], self.y[indices]]


class OpacusDPSGD:
    """DP-SGD as practitioners run it, through Opacus (extra ``study``): flat clipping, Poisson draws, public divisor.

    Formal guarantees: Opacus's own, for adding or removing one record, given that the number of records is public. Its
    epsilon is not a mere claim, so the method is called :meth:`epsilon`.

    Args:
        model: Any module Opacus supports; trained in place.
        max_gradient_norm: Bound on each record's whole gradient.
        noise_multiplier: sigma.
        accountant: ``"rdp"`` (as in the paper) or ``"prv"``.
        training: See :class:`Training`.
    """

    def __init__(
        self,
        model: nn.Module,
        max_gradient_norm: float = 1.0,
        noise_multiplier: float = 1.0,
        *,
        accountant: str = "rdp",
        **training: Unpack[Training],
    ) -> None:
        self.model, self.max_gradient_norm, self.noise_multiplier = model, max_gradient_norm, noise_multiplier
        self.training, self.accountant = training, accountant
        self._engine: Any = None

    def fit(self, X: Tensor, y: Tensor, *, steps: int) -> Self:
        """Train for ``steps`` steps; an empty draw releases pure noise and counts. May be called once."""
        try:
            from opacus import PrivacyEngine
        except ImportError as error:
            raise WeightclipError("the baseline needs Opacus: pip install -e studies") from error
        if self._engine is not None:
            raise WeightclipError("this OpacusDPSGD has been fitted: make a new one for a new run")
        loss = self.training.get("loss", cross_entropy)
        factory = self.training.get("optimizer", torch.optim.Adam)
        generator = self.training.get("generator")
        batch_size = max(1, round(min(self.training.get("batch_size", 256), len(X))))
        rows = _Rows(X, y)
        with warnings.catch_warnings():
            # Opacus warns about its non-cryptographic generator and about hooks on inputs without gradient.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            self._engine = PrivacyEngine(accountant=self.accountant)
            module, optimizer, loader = self._engine.make_private(
                module=self.model.train(),
                optimizer=factory(self.model.parameters(), lr=self.training.get("learning_rate", 1e-3)),
                data_loader=torch.utils.data.DataLoader(
                    rows, batch_size=batch_size, collate_fn=cast(Any, rows.collate), generator=generator
                ),
                noise_multiplier=self.noise_multiplier,
                max_grad_norm=self.max_gradient_norm,
                noise_generator=generator,
            )
            for x, target in _endless(loader, steps):
                optimizer.zero_grad()
                loss(module(x), target).mean().backward()
                optimizer.step()
            module.to_standard_module()  # take Opacus's hooks off the caller's model
        for parameter in self.model.parameters():
            parameter.grad = None
        return self

    def epsilon(self, delta: float) -> float:
        """Epsilon of the run, by Opacus's accountant."""
        if self.noise_multiplier == 0:
            return math.inf
        return 0.0 if self._engine is None else float(self._engine.get_epsilon(delta))


def _endless(loader: Any, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    done = 0
    while done < steps:
        for x, y in loader:
            yield x, y
            done += 1
            if done == steps:
                return
