"""The paper's networks, wide residual networks, small networks of the literature, heads on scattering features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Self

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.nn import ConvexResidual, Residual, SafeGroupNorm, StandardizedConv2d, UnitNorm


class MLP(nn.Module):
    """Dense layers with an activation, and optionally a safe group normalisation, after every layer but the last.

    Args:
        in_features: number of input features; inputs with more than one non-record dimension are flattened.
        hidden: widths of the hidden layers; ``()`` gives a linear model.
        out_features: number of logits.
        activation: makes one activation module.
        group_norm: number of groups of a `SafeGroupNorm` between each hidden layer and its activation; None: no norm.
        alpha: floor of the normalisation's divisor.
        bias: whether the dense layers have biases.

    Example:
        >>> import torch
        >>> MLP(105, hidden=(16,), out_features=2)(torch.zeros(4, 105)).shape
        torch.Size([4, 2])
    """

    _wc_rowwise = True  # forward acts on each row alone, as far as its layers do

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int] = (16,),
        out_features: int = 2,
        activation: Callable[[], nn.Module] = nn.ReLU,
        group_norm: int | None = None,
        alpha: float = 1.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_features
        for units in hidden:
            layers.append(nn.Linear(width, units, bias=bias))
            if group_norm is not None:
                layers.append(SafeGroupNorm(group_norm, units, alpha=alpha))
            layers.append(activation())
            width = units
        layers.append(nn.Linear(width, out_features, bias=bias))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


class ConvNet(nn.Module):
    """Two 3x3 convolutions, one max-pooling, two dense layers: 1,625,866 parameters on 1 x 28 x 28 inputs.

    Both convolutions are padded by 1, so that pooling leaves 64 x 14 x 14 = 12,544 features, as the paper's table of
    models requires. The pooling windows do not overlap: its gain is 1.

    Args:
        in_channels: colour planes of the input.
        size: height and width of the input, a multiple of 2.
        num_classes: number of logits.
        activation: makes one activation module.
        group_norm: number of groups of a `SafeGroupNorm` after each convolution; None: no normalisation.
        alpha: floor of the normalisation's divisor.
        weight_standardization: use `StandardizedConv2d`.

    Example:
        >>> import torch
        >>> sum(p.numel() for p in ConvNet().parameters())
        1625866
        >>> ConvNet()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 1,
        size: int = 28,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
        group_norm: int | None = None,
        alpha: float = 1.0,
        weight_standardization: bool = False,
    ) -> None:
        super().__init__()
        kind = StandardizedConv2d if weight_standardization else nn.Conv2d

        def block(c_in: int, c_out: int) -> list[nn.Module]:
            norm = [] if group_norm is None else [SafeGroupNorm(group_norm, c_out, alpha=alpha)]
            return [kind(c_in, c_out, 3, padding=1), *norm, activation()]

        self.features = nn.Sequential(*block(in_channels, 32), *block(32, 64), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(
            nn.Linear(64 * (size // 2) ** 2, 128), activation(), nn.Linear(128, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class SmallCNN(nn.Module):
    """A feature extractor and a dense classifier; build the two published ones by `for_mnist` and `for_cifar10`.

    Both are the networks of Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential Privacy"
    (2021), whose activation is tanh: bounded, with gain 1.

    Example:
        >>> import torch
        >>> SmallCNN.for_mnist()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> SmallCNN.for_cifar10()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    @classmethod
    def for_mnist(cls, num_classes: int = 10, activation: Callable[[], nn.Module] = nn.Tanh) -> Self:
        """26,010 parameters on 1 x 28 x 28 inputs (MNIST, Fashion-MNIST).

        The max-poolings overlap (2x2 windows, stride 1), as published: their l2 gain is 2 each.
        """
        features = nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),  # 16 x 14 x 14
            activation(),
            nn.MaxPool2d(2, 1),  # 16 x 13 x 13
            nn.Conv2d(16, 32, 4, stride=2),  # 32 x 5 x 5
            activation(),
            nn.MaxPool2d(2, 1),  # 32 x 4 x 4
        )
        classifier = nn.Sequential(nn.Linear(512, 32), activation(), nn.Linear(32, num_classes))
        return cls(features, classifier)

    @classmethod
    def for_cifar10(cls, num_classes: int = 10, activation: Callable[[], nn.Module] = nn.Tanh) -> Self:
        """550,570 parameters on 3 x 32 x 32 inputs: three pairs of 3x3 convolutions, each with 2x2 average-pooling."""
        layers: list[nn.Module] = []
        c_in = 3
        for c_out in (32, 64, 128):
            layers += [nn.Conv2d(c_in, c_out, 3, padding=1), activation()]
            layers += [nn.Conv2d(c_out, c_out, 3, padding=1), activation(), nn.AvgPool2d(2)]
            c_in = c_out
        classifier = nn.Sequential(nn.Linear(128 * 4 * 4, 128), activation(), nn.Linear(128, num_classes))
        return cls(nn.Sequential(*layers), classifier)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class WideResNet(nn.Module):
    """Pre-activation wide residual network (Zagoruyko & Komodakis, 2016) for small images.

    Batch normalisation mixes records, so `SafeGroupNorm` takes its place. With the defaults (normalisation without
    parameters, convolutions with biases) WRN-40-4 has exactly the 8,944,266 parameters of the paper's table, WRN-16-4
    2,747,530. The usual layout, affine normalisation and no convolution biases (``affine=True, bias=False``), has
    8,949,210. The graph is plain: convolutions, normalisations, activations, additions, an average, a dense layer.

    Args:
        depth: number of layers, ``6 n + 4``.
        width: widening factor.
        num_classes: number of logits.
        groups: groups of every normalisation; divides 16.
        norm: ``"safe"`` for `SafeGroupNorm`, ``"none"`` for no normalisation.
        alpha: floor of the normalisation's divisor.
        affine: whether the normalisations have parameters.
        bias: whether the convolutions have biases. A convolution's bias is dear under privacy.
        weight_standardization: use `StandardizedConv2d`.
        convex: weight of the body in a convex combination with the shortcut (gain 1 at any depth); None: plain sum.
        in_channels: colour planes of the input.
        stem: channels of the first convolution.
        activation: makes one activation module.

    Example:
        >>> sum(p.numel() for p in WideResNet(16, 4).parameters())
        2747530
        >>> WideResNet(10, 1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int = 16,
        width: int = 4,
        num_classes: int = 10,
        groups: int = 16,
        norm: Literal["safe", "none"] = "safe",
        alpha: float = 1.0,
        affine: bool = False,
        bias: bool = True,
        weight_standardization: bool = False,
        convex: float | None = None,
        in_channels: int = 3,
        stem: int = 16,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise WeightclipError(f"WideResNet: depth must be 6 n + 4 with n >= 1 (10, 16, 28, 40, ...), got {depth}")
        if norm not in ("safe", "none"):
            raise WeightclipError(f"WideResNet: norm must be 'safe' or 'none', got {norm!r}")

        def conv(c_in: int, c_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
            kind = StandardizedConv2d if weight_standardization else nn.Conv2d
            layer = kind(c_in, c_out, kernel, stride=stride, padding=kernel // 2, bias=bias)
            nn.init.normal_(layer.weight, std=math.sqrt(2.0 / (c_in * kernel**2)))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
            return layer

        def norm_act(channels: int) -> list[nn.Module]:
            layers: list[nn.Module] = [activation()]
            return layers if norm == "none" else [SafeGroupNorm(groups, channels, alpha, affine), *layers]

        def merge(body: nn.Module, shortcut: nn.Module | None) -> nn.Module:
            return Residual(body, shortcut) if convex is None else ConvexResidual(body, convex, shortcut)

        layers: list[nn.Module] = [conv(in_channels, stem, 3)]
        c_in = stem
        for group, c_out in enumerate((16 * width, 32 * width, 64 * width)):
            for block in range((depth - 4) // 6):
                stride = 2 if group > 0 and block == 0 else 1
                inner = [conv(c_in, c_out, 3, stride), *norm_act(c_out), conv(c_out, c_out, 3)]
                if c_in == c_out and stride == 1:
                    layers.append(merge(nn.Sequential(*norm_act(c_in), *inner), None))
                else:  # where the shape changes, the first normalisation and activation serve both branches
                    layers += [*norm_act(c_in), merge(nn.Sequential(*inner), conv(c_in, c_out, 1, stride))]
                c_in = c_out
        self.features = nn.Sequential(*layers, *norm_act(c_in))
        self.classifier = nn.Linear(c_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.mean(self.features(x), (2, 3)))


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
