"""Classifiers on precomputed scattering features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.models._mlp import MLP
from weightclip.nn import SafeGroupNorm, UnitNorm


class ScatteringHead(nn.Module):
    """Per-record normalisation of scattering features, a norm bound, then a linear, dense or convolutional classifier.

    ``head.input`` has no parameters: apply it once to a whole data set and train ``head.body`` on the result, or train
    the head itself. Features come as (records, channels, height, width) or, straight from `Scattering2d`, as
    (records, planes, paths, height, width).

    Formal guarantees: with the default ``bound`` every record enters ``body`` with l2 norm at most 1.

    Args:
        kind: ``"linear"``; ``"mlp"``, dense layers of widths ``hidden``; ``"cnn"``, 3x3 convolutions of widths
            ``hidden`` with 2x2 max-pooling between them, then a dense layer.
        in_channels: planes times paths, e.g. 81 for MNIST and 243 for CIFAR-10.
        size: height and width of the features, e.g. 7 for MNIST and 8 for CIFAR-10.
        hidden: widths of the hidden layers; default (128,) for ``"mlp"``, (64, 64) for ``"cnn"``.
        num_classes: number of logits.
        groups: groups of the normalisation, divides ``in_channels``; None: no normalisation.
        alpha: floor of the normalisation's divisor. Nothing before it has parameters, so its gain is free.
        bound: module that bounds each record's norm after the normalisation, or None for ``UnitNorm(1.0)``.
        activation: makes one activation module.
        bias: whether convolutions and dense layers have biases.

    Example:
        >>> import torch
        >>> ScatteringHead("mlp", 243, 8, hidden=(64,))(torch.rand(2, 3, 81, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        kind: Literal["linear", "mlp", "cnn"] = "linear",
        in_channels: int = 81,
        size: int | tuple[int, int] = 7,
        hidden: Sequence[int] | None = None,
        num_classes: int = 10,
        groups: int | None = 27,
        alpha: float = 1e-3,
        bound: nn.Module | None = None,
        activation: Callable[[], nn.Module] = nn.ReLU,
        bias: bool = True,
    ) -> None:
        super().__init__()
        defaults: dict[str, tuple[int, ...]] = {"linear": (), "mlp": (128,), "cnn": (64, 64)}
        if kind not in defaults:
            raise WeightclipError(f"ScatteringHead: kind must be one of {', '.join(defaults)}, got {kind!r}")
        widths = defaults[kind] if hidden is None else tuple(hidden)
        if (kind == "linear") != (not widths):
            raise WeightclipError(f"ScatteringHead: kind {kind!r} does not go with hidden={widths}")
        height, width = (size, size) if isinstance(size, int) else size
        norm = [] if groups is None else [SafeGroupNorm(groups, in_channels, alpha)]
        self.input = nn.Sequential(*norm, UnitNorm(1.0) if bound is None else bound)
        self.in_channels = in_channels
        if kind != "cnn":
            self.body: nn.Module = MLP(in_channels * height * width, widths, num_classes, activation, bias=bias)
            return
        layers: list[nn.Module] = []
        c_in = in_channels
        for i, c_out in enumerate(widths):
            if i > 0:
                layers.append(nn.MaxPool2d(2))  # windows do not overlap: gain 1
                height, width = height // 2, width // 2
            layers += [nn.Conv2d(c_in, c_out, 3, padding=1, bias=bias), activation()]
            c_in = c_out
        if min(height, width) < 1:
            raise WeightclipError(f"ScatteringHead: {len(widths)} convolutions pool a {size} map to nothing")
        self.body = nn.Sequential(*layers, nn.Flatten(1), nn.Linear(c_in * height * width, num_classes, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 5:
            x = x.flatten(1, 2)
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise WeightclipError(
                f"ScatteringHead expects (records, {self.in_channels}, height, width), got shape {tuple(x.shape)}"
            )
        return self.body(self.input(x))
