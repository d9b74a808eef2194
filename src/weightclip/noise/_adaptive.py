"""Limits that follow private quantiles (Andrew et al. 2021), paid inside the joint noise of the step.

Every enforced limit (layer radius, cotangent radius, layer cap) is one query a step: how many of the records' norms lie
within it, as a sum of indicators centred at one half. The noisy answer moves the limit geometrically
(SOUNDNESS Theorem 17).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.certificate import Adaptive
from weightclip.errors import WeightclipError
from weightclip.factors import count_into, limits_of, limits_set
from weightclip.noise._mechanisms import quantile_adjusted_sigma
from weightclip.noise._streams import Streams

QUANTILES = "weightclip/quantiles"
_SILENT = 1e-15  # a record whose cotangent is (as good as) zero, padding above all, has no say
_LOWEST, _HIGHEST = 1e-9, 1e9
FIELDS = ("layer_radius", "cotangent_radius", "layer_cap")  # in the order of a private layer's limits


class Counter:
    """Sums of centred indicators of one layer, filled inside its backward; nothing waits for the device.

    Formal guarantees:
        One record moves each of the three sums by at most 1/2, for a layer used ``uses`` times on each of ``views``
        views of the record. Records with a zero or non-finite cotangent (padding) move none.
    """

    def __init__(self, uses: int, views: int, device: torch.device) -> None:
        self.share = 1.0 / (uses * views)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, index: int, inside: Tensor, d_norm: Tensor) -> None:
        """Count records for which ``inside`` holds; the collector asks once for each of the layer's uses."""
        speaks = (d_norm > _SILENT) & torch.isfinite(d_norm)
        centred = torch.where(speaks, inside.to(torch.float64) - 0.5, 0.0)
        self.sums[index] += self.share * centred.sum()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied model trains on its own

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Quantiles:
    """The queries of a run: counters on the layers, one noisy answer each per step, and the limits that follow.

    Args:
        settings: The user's wishes.
        layers: Private layers with their number of uses in the graph.
        views: Augmentation multiplicity.
        batch: Public expected batch size.
        sigma: Multiplier of the whole step, the one that is accounted.

    Formal guarantees:
        Gradients released with multiplier ``gradient_sigma`` together with these answers are one Gaussian mechanism
        with multiplier ``sigma`` (adding or removing one record): sigma^-2 = gradient_sigma^-2 + Q (2 sigma_b)^-2. The
        limits are functions of released answers.
    """

    def __init__(
        self, settings: Adaptive, layers: Mapping[str, tuple[nn.Module, int]], views: int, batch: float, sigma: float
    ) -> None:  # fmt: skip
        self.settings, self.batch = settings, batch
        self.sigma_b = settings.noise if settings.noise is not None else batch / 20
        self.queries: list[tuple[str, int]] = []
        self.modules: dict[str, nn.Module] = {}
        self.counters: dict[str, Counter] = {}
        for path, (layer, uses) in layers.items():
            enforced = limits_set(layer)
            if enforced:
                self.counters[path] = Counter(uses, views, limits_of(layer).device)
                count_into(layer, self.counters[path])
                self.modules[path] = layer
                self.queries += [(path, i) for i in enforced]
        if not self.queries:
            raise WeightclipError(
                "Bounds.adaptive has nothing to adapt: set layer_radius, cotangent_radius or layer_cap to start from."
            )
        self.gradient_sigma = quantile_adjusted_sigma(sigma, len(self.queries), self.sigma_b * (1 - 1e-9))
        self.noisy = sigma > 0

    def clear(self) -> None:
        """Forget the counts of an abandoned draw."""
        for counter in self.counters.values():
            counter.sums.zero_()

    @torch.no_grad()
    def release(self, streams: Streams, step: int) -> None:
        """Answer every query with noise and move the limits."""
        sums = torch.stack([self.counters[path].sums[i] for path, i in self.queries])
        if self.noisy:
            sums = sums + self.sigma_b * streams.normal_(torch.empty_like(sums), QUANTILES, step)
        share = sums / self.batch + 0.5
        moves = torch.exp(-self.settings.rate * (share - self.settings.quantile))
        for (path, i), move in zip(self.queries, moves.unbind(), strict=True):
            limit = limits_of(self.modules[path])[i]
            limit.copy_((limit * move).clamp(_LOWEST, _HIGHEST))
        self.clear()

    def counts(self) -> list[Tensor]:
        """The counts of the present draw."""
        return [counter.sums for counter in self.counters.values()]

    def limits(self) -> list[Tensor]:
        """The limits in force."""
        return [limits_of(module) for module in self.modules.values()]

    def tensors(self) -> list[Tensor]:
        """Counts and limits."""
        return [t for pair in zip(self.counts(), self.limits(), strict=True) for t in pair]

    def limit(self, field: str, path: str) -> float | Tensor | None:
        """The limit in force, as a number on the CPU and as a tensor elsewhere (nothing waits); None: not adapted."""
        index = FIELDS.index(field)
        if (path, index) not in self.queries:
            return None
        value = limits_of(self.modules[path])[index].double()
        return float(value) if value.device.type == "cpu" else value

    def state(self) -> dict[str, list[float]]:
        """The limits, JSON-ready: released values."""
        return {path: limits_of(module).tolist() for path, module in self.modules.items()}

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Limits of a saved run."""
        for path, values in state.items():
            if path in self.modules:
                limits = limits_of(self.modules[path])
                limits.copy_(torch.tensor(values, dtype=limits.dtype))

    def report(self) -> dict[str, Any]:
        """What :meth:`weightclip.PrivacyEngine.report` says about it."""
        limits = {f"{path}.{FIELDS[i]}": float(limits_of(self.modules[path])[i]) for path, i in self.queries}
        return {"quantile": self.settings.quantile, "rate": self.settings.rate, "noise": self.sigma_b,
                "queries_per_step": len(self.queries), "gradient_multiplier": self.gradient_sigma,
                "limits": limits}  # fmt: skip
