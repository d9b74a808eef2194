"""One training run of the figure: network, method, and how it is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.bounds import Rescale, Sphere
from weightclip.certificate import Bounds
from weightclip.errors import WeightclipError
from weightclip.losses import CrossEntropy
from weightclip.models import ConvNet, WideResNet
from weightclip_studies.images._nets import layer_norms

METHODS: dict[str, str] = {
    "joint": "exact cap over all layers",
    "opacus": "DP-SGD by Opacus",
    "caps": "exact cap on each layer",
    "weights": "Lip-DP-SGD, sound (weights)",
    "fix": "Fix-Lip, sound",
    "factors": "both factors bounded",
    "opacus-adaptive": "Opacus, adaptive threshold",
    "plain": "not private",
}
"""Name -> title, in the order of importance."""
BY_OPACUS = ("opacus", "opacus-adaptive")


@dataclass(frozen=True)
class Recipe:
    """All of a run's settings; every field is public.

    Attributes:
        network: Key of `NETWORKS`.
        method: Key of `METHODS`.
        batch: Expected batch size b.
        steps: Releases T.
        learning_rate: Of Adam; of SGD in units of the threshold, as De et al. count it.
        clip: Threshold of joint and opacus; C of ClipWeights for weights and fix; for caps and factors a factor on
            medians over synthetic pictures.
        quantile: Share of records that opacus-adaptive is to leave alone.
        adam: Adam; otherwise SGD without momentum.
        decay: The learning rate falls to zero along a straight line; otherwise it is constant.
        average: Decay of the parameter average that is evaluated; 0: the last weights.
        group_norm: Group normalisation with 16 groups.
        standardise: Weight standardisation of the convolutions.
        views: Augmented views of each record (its gradient is their average); 0: the record itself.
        fast: bfloat16, channels-last and torch.compile on CUDA; otherwise TF32.
    """

    network: str
    method: str
    batch: int = 2048
    steps: int = 300
    learning_rate: float = 2e-3
    clip: float = 1.0
    quantile: float = 0.5
    adam: bool = True
    decay: bool = True
    average: float = 0.95
    group_norm: bool = False
    standardise: bool = False
    views: int = 0
    fast: bool = False

    def __post_init__(self) -> None:
        for field, known in (("network", NETWORKS), ("method", METHODS)):
            if getattr(self, field) not in known:
                raise WeightclipError(f"Recipe.{field}: one of {', '.join(known)}, got {getattr(self, field)!r}")
        if self.method in BY_OPACUS and self.views > 1:
            raise WeightclipError("Recipe.views: several views of a record are for the engine, not for Opacus")

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return dataclasses.asdict(self)

    def rate(self, done: int) -> float:
        """The optimiser's learning rate of the step after ``done`` others."""
        per_unit = self.learning_rate if self.adam or self.method == "plain" else self.learning_rate / self.clip
        return per_unit * (1 - done / self.steps) if self.decay else per_unit

    def loss(self) -> CrossEntropy:
        """The loss; where the bound comes from weights alone its gradient is capped at 1/2."""
        return CrossEntropy(cap=0.5 if self.method in ("weights", "fix") else None)


def _wide(depth: int, width: int) -> Callable[[Recipe, int, int], nn.Module]:
    return lambda r, planes, size: WideResNet(
        depth, width, norm="safe" if r.group_norm else "none", alpha=_floor(r), in_channels=planes,
        weight_standardization=r.standardise,
    )  # fmt: skip


def _convnet(r: Recipe, planes: int, size: int) -> nn.Module:
    return ConvNet(planes, size, group_norm=16 if r.group_norm else None, alpha=_floor(r),
                   weight_standardization=r.standardise)  # fmt: skip


def _floor(recipe: Recipe) -> float:
    """alpha of group normalisation: bounds from weights pay 1/alpha for every layer, limits on products pay nothing."""
    return 1.0 if recipe.method in ("weights", "fix") else 0.01


NETWORKS: dict[str, Callable[[Recipe, int, int], nn.Module]] = {
    "convnet": _convnet, "wrn-16-4": _wide(16, 4), "wrn-40-4": _wide(40, 4), "wrn-10-1": _wide(10, 1),
}  # fmt: skip
"""Name -> maker of the network for colour planes and size; wrn-10-1 is for tests."""


def build(recipe: Recipe, planes: int, size: int, seed: int) -> nn.Module:
    """The network with initial weights that the seed alone decides."""
    with torch.random.fork_rng():  # generators of GPUs too, which manual_seed reaches
        torch.manual_seed(seed)
        return NETWORKS[recipe.network](recipe, planes, size)


def bounds_for(recipe: Recipe, model: nn.Module, x: Tensor) -> Bounds:
    """What the engine enforces; thresholds by layer are medians over public inputs ``x`` at the initial weights.

    Formal guarantees: reads the initial weights and ``x`` alone, both public.
    """
    r = recipe
    if r.method == "joint":
        return Bounds(max_grad_norm=r.clip)
    if r.method in ("weights", "fix"):
        radius = float(x.flatten(1).norm(dim=1).median())
        onto = Sphere() if r.method == "fix" else Rescale()
        return Bounds(input_radius=radius, weight_norm=r.clip, spectral=False, clip=onto)
    if r.method not in ("caps", "factors"):
        raise WeightclipError(f"bounds_for: {r.method!r} is not trained by the engine")
    norms = layer_norms(model, r.loss(), x, torch.arange(len(x), device=x.device) % 10)

    def median(key: str, factor: float = 1.0) -> dict[str, float]:
        return {path: max(factor * float(n[key].median()), 1e-6) for path, n in norms.items()}

    if r.method == "caps":
        return Bounds(layer_cap=median("exact", r.clip))
    return Bounds(layer_radius=median("input"), cotangent_radius=median("cotangent", r.clip))
