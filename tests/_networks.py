"""Random networks, losses and bounds from a small grammar, and simple cases where bounds are nearly attained."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weightclip as wc
from weightclip import nn as wnn
from weightclip.certificate import Certificate
from weightclip.factors import CapNorm, Product
from weightclip.losses import L1, MSE, BCEWithLogits, Cosine, CrossEntropy, Huber, Loss, MultiMargin, SmoothL1

Shape = tuple[int, ...]


# -- blocks ------------------------------------------------------------------------------------------------------------


class Concat(nn.Module):
    """Branches side by side on dimension 1."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate."""
        return torch.cat([b(x) for b in self.branches], 1)


class Twice(nn.Module):
    """One layer used twice, with something in between."""

    def __init__(self, layer: nn.Module, between: nn.Module) -> None:
        super().__init__()
        self.layer, self.between = layer, between

    def forward(self, x: Tensor) -> Tensor:
        """layer(between(layer(x)))."""
        return self.layer(self.between(self.layer(x)))


class Doubled(nn.Module):
    """y + y: one user, two edges."""

    def forward(self, x: Tensor) -> Tensor:
        """Add to itself."""
        y = torch.tanh(x)
        return y + y


class Attention(nn.Module):
    """Self-attention without parameters: no finite gain."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend over positions."""
        return F.scaled_dot_product_attention(x, x, x)


class Mean(nn.Module):
    """Mean over all dimensions after the first of a record."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        """Average."""
        return x.mean(tuple(range(self.first, x.dim())))


class Affine(nn.Module):
    """c x + b with constants."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("c", torch.randn(n, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift."""
        return x * self.c + 0.3


ACTIVATIONS: Sequence[Callable[[], nn.Module]] = (
    nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU, nn.Softplus, lambda: nn.LeakyReLU(0.1), nn.Mish,
    lambda: nn.Hardtanh(-0.5, 2.0), nn.LogSigmoid, lambda: nn.GELU(approximate="tanh"), lambda: nn.ReLU(inplace=True),
    lambda: nn.Dropout(0.3), nn.SELU, nn.Hardswish,
)  # fmt: skip


@dataclass
class Grammar:
    """Draws blocks for a record of a given shape."""

    draw: random.Random
    attention: bool = False

    def act(self, fresh: bool = True) -> nn.Module:
        """An activation; in place only where nobody else reads its input."""
        found = self.draw.choice(ACTIVATIONS)()
        return found if fresh or not getattr(found, "inplace", False) else nn.ReLU()

    def bias(self) -> bool:
        """Bias on or off."""
        return self.draw.random() < 0.7

    def vector(self, n: int) -> tuple[nn.Module, int]:
        """A block on vectors."""
        draw = self.draw
        m = draw.randint(2, 6)
        kind = draw.choice(
            ["dense", "dense", "residual", "concat", "norm", "twice", "doubled", "project", "affine", "sort"]
        )
        if kind == "residual":
            body = nn.Sequential(nn.Linear(n, m), self.act(), nn.Linear(m, n, bias=self.bias()))
            return draw.choice([wnn.Residual, wnn.ConvexResidual])(body), n
        if kind == "concat":
            return Concat(
                nn.Linear(n, m, bias=self.bias()), nn.Sequential(self.act(fresh=False), nn.Linear(n, 2)), nn.Identity()
            ), m + 2 + n
        if kind == "norm":
            affine = draw.random() < 0.6
            return draw.choice([lambda: wnn.SafeLayerNorm(n, alpha=draw.choice([0.3, 1.0]), affine=affine),
                                lambda: wnn.SafeGroupNorm(1, n, alpha=0.5, affine=affine)])(), n  # fmt: skip
        if kind == "twice":
            return Twice(nn.Linear(n, n, bias=self.bias()), self.act()), n
        if kind == "doubled":
            return Doubled(), n
        if kind == "project":
            return wnn.Project(draw.choice([0.5, 2.0]), detach=draw.random() < 0.5), n
        if kind == "affine":
            return Affine(n, draw.randint(0, 99)), n
        if kind == "sort" and n % 2 == 0:
            return wnn.MaxMin(), n
        return nn.Sequential(nn.Linear(n, m, bias=self.bias()), self.act()), m

    def conv(self, channels: int, size: Shape) -> nn.Module:
        """A convolution of random geometry that fits."""
        draw, axes = self.draw, len(size)
        groups = 2 if channels % 2 == 0 and draw.random() < 0.3 else 1
        kernel = [draw.randint(1, min(3, n)) for n in size]
        dilation = [draw.choice([1, 2]) if 2 * (k - 1) < n else 1 for k, n in zip(kernel, size, strict=True)]
        stride = [draw.choice([1, 1, 2]) for _ in size]
        mode = draw.choice(["zeros", "zeros", "zeros", "circular"])
        if mode == "circular":
            padding = [draw.randint(0, d * (k - 1) // 2) for k, d in zip(kernel, dilation, strict=True)]
            stride = [s if n % s == 0 else 1 for s, n in zip(stride, size, strict=True)]
        else:
            padding = [draw.randint(0, 1) for _ in size]
        out = groups * draw.randint(1, 3)
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        return kind(channels, out, kernel, stride, padding, dilation, groups, self.bias(), mode)

    def image(self, shape: Shape) -> nn.Module:
        """A block on (channels, *size)."""
        draw, axes = self.draw, len(shape) - 1
        kind = draw.choice(["conv", "conv", "conv", "norm", "pool", "residual", "transposed", "up"])
        if kind == "norm":
            affine = draw.random() < 0.6
            return draw.choice([lambda: wnn.SafeGroupNorm(1, shape[0], alpha=0.5, affine=affine),
                                lambda: wnn.SafeInstanceNorm(shape[0], affine=affine)])()  # fmt: skip
        if kind == "pool" and min(shape[1:]) >= 3:
            name = draw.choice(["MaxPool", "AvgPool"])
            return getattr(nn, f"{name}{axes}d")(draw.choice([2, 3]), stride=draw.choice([1, 2]))
        if kind == "residual":
            conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
            return wnn.Residual(
                nn.Sequential(conv(shape[0], shape[0], 3, padding="same", bias=self.bias()), self.act())
            )
        if kind == "transposed" and max(shape[1:]) <= 4:
            transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
            return transposed(shape[0], 2, 2, stride=draw.choice([1, 2]), bias=self.bias())
        if kind == "up" and max(shape[1:]) <= 4:
            return nn.Upsample(scale_factor=2)
        return nn.Sequential(self.conv(shape[0], shape[1:]), self.act())

    def positions(self, shape: Shape) -> nn.Module:
        """A block on (positions, features)."""
        n = shape[-1]
        kinds = ["dense", "dense", "norm", "residual", *(["attention"] if self.attention else [])]
        kind = self.draw.choice(kinds)
        if kind == "attention":
            return Attention()
        if kind == "norm":
            return wnn.SafeLayerNorm(n, affine=self.draw.random() < 0.5)
        if kind == "residual":
            return wnn.Residual(nn.Sequential(nn.Linear(n, n, bias=self.bias()), self.act()))
        return nn.Sequential(nn.Linear(n, self.draw.randint(2, 5), bias=self.bias()), self.act())


def shape_after(module: nn.Module, shape: Shape, tokens: bool = False) -> Shape:
    """Shape of one record behind a module."""
    dtype = torch.long if tokens else torch.float32
    with torch.no_grad():
        return tuple(module(torch.zeros(2, *shape, dtype=dtype)).shape[1:])


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A model, what is enforced on it, and the loss."""

    model: nn.Module
    shape: Shape
    loss: Loss
    bounds: wc.Bounds
    tokens: bool = False
    classes: int = 3
    notes: dict[str, str] = field(default_factory=dict)
    starts: Sequence[Tensor] = ()

    def example(self) -> Tensor:
        """Two records of the right shape."""
        return torch.zeros(2, *self.shape, dtype=torch.long if self.tokens else torch.float32)

    def certificate(self) -> Certificate:
        """The certificate of the model as it is."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*gain 1/sqrt")
            return wc.certify(self.model, self.loss, example=self.example(), bounds=self.bounds)


def random_model(draw: random.Random, family: str, enforced: bool) -> tuple[nn.Module, Shape, bool, int]:
    """A model of a family; ``enforced`` allows operators without a finite gain."""
    grammar = Grammar(draw, attention=enforced)
    classes = draw.randint(2, 4)
    layers: list[nn.Module] = []
    tokens = False
    if family == "dense":
        shape: Shape = (draw.randint(2, 5),)
    elif family == "conv":
        axes = draw.choice([1, 1, 2, 2, 3])
        shape = (draw.randint(1, 3), *(draw.randint(3, 6 if axes < 3 else 4) for _ in range(axes)))
    else:
        tokens = draw.random() < 0.3
        shape = (draw.randint(2, 4),) if tokens else (draw.randint(2, 4), draw.randint(2, 4))
        if tokens:
            layers.append(nn.Embedding(4, 3))
    now = shape_after(nn.Sequential(*layers), shape, tokens) if layers else shape
    for _ in range(draw.randint(1, 3) if family != "dense" else draw.randint(0, 3)):
        if family == "dense":
            block, n = grammar.vector(now[0])
            now = (n,)
        else:
            block = grammar.image(now) if family == "conv" else grammar.positions(now)
            now = shape_after(block, now)
        layers.append(block)
    if family != "dense":
        pooled = draw.random() < 0.4
        if pooled and family == "positions":
            layers.append(Mean(2))
        else:
            layers.append(Mean(2) if pooled else nn.Flatten())
        now = shape_after(layers[-1], now)
    layers.append(nn.Linear(now[0], classes, bias=grammar.bias()))
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for q in model.parameters():  # also far from usual initialisations
            q.mul_(draw.choice([0.3, 1.0, 1.0, 3.0]))
    return model, shape, tokens, classes


def random_loss(draw: random.Random, classes: int) -> Loss:
    """Any loss with a bound."""
    return draw.choice([
        lambda: CrossEntropy(), lambda: CrossEntropy(smoothing=0.2),
        lambda: CrossEntropy(class_weights=[0.5 + i for i in range(classes)]), lambda: CrossEntropy(temperature=0.5),
        lambda: CrossEntropy(cap=0.3), lambda: CrossEntropy(temperature=2.0, scale_by_temperature=True),
        lambda: BCEWithLogits(), lambda: BCEWithLogits(pos_weight=3.0), lambda: MultiMargin(), lambda: Huber(delta=0.7),
        lambda: SmoothL1(), lambda: L1(), lambda: MSE(output_bound=1.0, target_bound=2.0), lambda: Cosine(floor=0.5),
    ])()  # fmt: skip


def layer_names(model: nn.Module) -> list[str]:
    """Paths of layers with parameters."""
    return [path for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]


def random_bounds(draw: random.Random, model: nn.Module, tokens: bool) -> tuple[str, wc.Bounds]:
    """One of the strategies of SOUNDNESS section 4."""
    names = layer_names(model)
    radius = draw.choice([0.3, 1.0, 5.0])
    kind = draw.choice(
        ["weights", "weights", "layer radius", "cotangent", "factors", "cap", "mixed", "inner projection"]
    )
    common: dict = {"bias_scale": draw.choice([1.0, 1.0, 0.2, 3.0])}
    if draw.random() < 1 / 3:
        common["p"] = draw.choice([1, math.inf])
    if draw.random() < 0.2:
        common["spectral"] = False
    if draw.random() < 0.2:
        common["product"] = Product(torch.float32, chunk=draw.choice([0, 1]))
    if kind == "weights":
        return kind, wc.Bounds(input_radius=radius, **common)
    if kind == "layer radius":
        return kind, wc.Bounds(input_radius=radius, layer_radius=draw.choice([0.2, 1.0]), **common)
    if kind == "cotangent":
        return kind, wc.Bounds(input_radius=radius, cotangent_radius=draw.choice([0.05, 0.5]), **common)
    if kind == "factors":
        return kind, wc.Bounds(
            layer_radius=draw.choice([0.2, 2.0]), cotangent_radius=draw.choice([0.05, 0.5]), **common
        )
    if kind == "cap":
        return kind, wc.Bounds(layer_cap=draw.choice([0.01, 0.3]), caps=draw.choice(list(CapNorm)), **common)
    if kind == "inner projection":
        inner = draw.choice(names)
        return kind, wc.Bounds(input_radius={"": radius, inner: 0.5}, **common)
    pick = {name: draw.choice([0.05, 0.5, 2.0]) for name in names}
    split = draw.randint(0, len(names))
    common["bias_scale"] = {name: draw.choice([0.3, 2.0]) for name in names}
    caps, cotangents = ({n: pick[n] for n in part} for part in (names[:split], names[split:]))
    radii = {n: 1.0 for n in names if draw.random() < 0.3}
    return kind, wc.Bounds(
        input_radius=radius, layer_cap=caps, cotangent_radius=cotangents, layer_radius=radii, **common
    )


def random_case(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    family = ("dense", "conv", "positions")[seed % 3]
    enforced = draw.random() < 0.3
    model, shape, tokens, classes = random_model(draw, family, enforced)
    kind, bounds = random_bounds(draw, model, tokens)
    if enforced and any(isinstance(m, Attention) for m in model.modules()):
        kind, bounds = "factors", replace(bounds, layer_cap=None, layer_radius=1.0, cotangent_radius=0.3)
    return Case(model, shape, random_loss(draw, classes), bounds, tokens, classes, {"family": family, "bounds": kind})


# -- simple cases, where bounds are nearly attained --------------------------------------------------------------------


def _confident(layer: nn.Module, size: float = 30.0) -> nn.Module:
    """Large weights: the loss saturates, so its gradient attains its bound."""
    with torch.no_grad():
        for q in layer.parameters():
            q.mul_(size)
    return layer


def simple_cases() -> dict[str, Case]:
    """One layer, or one enforced limit: a climber must come close, or it proves nothing elsewhere."""
    torch.manual_seed(0)
    ce = CrossEntropy()
    conv = nn.Sequential(_confident(nn.Conv1d(1, 2, 3, padding=1, bias=False), 300.0), Mean(2))
    image = nn.Sequential(_confident(nn.Conv2d(1, 2, 2, bias=True), 300.0), Mean(2))
    rotation = nn.Linear(3, 3, bias=False)
    nn.init.orthogonal_(rotation.weight)
    tokens = nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(6, 3, bias=False))
    with torch.no_grad():  # every position counts alike, and for the two classes that differ most
        tokens[2].weight.copy_(torch.tensor([[10.0, 5.0], [-10.0, -5.0], [0.0, 0.0]]).repeat(1, 3))
    positions = nn.Sequential(nn.Linear(4, 3), Mean(2), nn.Linear(5, 3))
    small = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    dense = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return {
        "dense": Case(_confident(nn.Linear(4, 3)), (4,), ce, wc.Bounds(input_radius=1.0)),
        "dense, beta": Case(_confident(nn.Linear(4, 3)), (4,), ce, wc.Bounds(input_radius=0.3, bias_scale=0.5)),
        "dense, p = inf": Case(_confident(nn.Linear(4, 1)), (4,), BCEWithLogits(),
                               wc.Bounds(input_radius=1.0, p=math.inf), classes=1),
        "dense, p = 1": Case(_confident(nn.Linear(4, 1)), (4,), BCEWithLogits(), wc.Bounds(input_radius=1.0, p=1),
                             classes=1),
        "dense, Huber": Case(nn.Linear(4, 3), (4,), Huber(), wc.Bounds(input_radius=1.0)),
        "dense, capped loss": Case(nn.Linear(4, 3), (4,), CrossEntropy(cap=0.2), wc.Bounds(input_radius=1.0)),
        "rotation then dense": Case(nn.Sequential(rotation, _confident(nn.Linear(3, 3))), (3,), ce,
                                    wc.Bounds(input_radius=1.0)),
        "conv": Case(conv, (1, 24), ce, wc.Bounds(input_radius=1.0), classes=2),
        "conv with a bias": Case(image, (1, 9, 9), ce, wc.Bounds(input_radius=20.0, bias_scale=0.1), classes=2),
        "embedding": Case(tokens, (3,), ce, wc.Bounds(layer_cap={"2": 100.0}), tokens=True),
        "cap": Case(dense, (4,), ce, wc.Bounds(layer_cap=0.05)),
        "cap of a conv": Case(small, (1, 4, 4), ce, wc.Bounds(layer_cap=0.05)),
        "cap over positions": Case(positions, (5, 4), ce, wc.Bounds(layer_cap=0.05)),
        "radii": Case(dense, (4,), ce, wc.Bounds(layer_radius=0.5, cotangent_radius=0.1)),
        "radii of a conv": Case(nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten(), nn.Linear(48, 3)), (1, 4, 4), ce,
                                wc.Bounds(layer_radius=0.5, cotangent_radius=0.01)),
    }  # fmt: skip
