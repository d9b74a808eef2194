"""The convolutional networks of the study, and what a record looks like when it reaches them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.factors import CHANNEL, EXACT, FREE, Geometry, conv_record_norm
from weightclip.losses import Loss
from weightclip.models import ScatteringHead, SmallCNN, WideResNet
from weightclip_studies.images._features import FeatureMap, FeatureSettings
from weightclip_studies.images._synthetic import dead_leaves

_WHITE = FeatureSettings(whiten=1.0)


@dataclass(frozen=True)
class Network:
    """A model for images of one data set.

    Attributes:
        make: Builds the model for so many colour planes.
        scattering: Whether it reads whitened scattering maps instead of pixels.
    """

    make: Callable[[int], nn.Module]
    scattering: bool = False


def _small(planes: int) -> nn.Module:
    return SmallCNN.for_mnist() if planes == 1 else SmallCNN.for_cifar10()


def _head(planes: int) -> nn.Module:
    size = 7 if planes == 1 else 8
    return ScatteringHead("cnn", 81 * planes, size, (64, 64), groups=None, activation=nn.Tanh).body


NETWORKS: dict[str, Network] = {
    "small-cnn": Network(_small),
    "scattering+cnn": Network(_head, scattering=True),
    "wrn-16-4": Network(lambda planes: WideResNet(16, 4, in_channels=planes)),
    "wrn-10-1": Network(lambda planes: WideResNet(10, 1, in_channels=planes)),  # for tests
}


@dataclass
class Pictures:
    """Records of one data set on a device: uint8 pixels or float16 scattering maps, and labels.

    Formal guarantees: each stored record is a function of its own image and public constants alone.
    """

    x: Tensor
    y: Tensor
    scattering: bool

    @classmethod
    def load(cls, images: Tensor, labels: Tensor, network: str, chunk: int = 1000) -> Pictures:
        """From uint8 images, records x height x width (x planes), as `load_images` gives them."""
        planes = images.unsqueeze(1) if images.dim() == 3 else images.movedim(-1, 1)
        if not _network(network).scattering:
            return cls(planes.contiguous(), labels.long(), False)
        front = _Front(tuple(images.shape[1:]), images.device)
        parts = [front(part.float() / 255).half() for part in planes.split(chunk)]
        return cls(torch.cat(parts), labels.long(), True)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def planes(self) -> int:
        """Colour planes of the images."""
        return self.x.shape[1] // 81 if self.scattering else self.x.shape[1]

    def subset(self, rows: Tensor) -> Pictures:
        """Chosen records."""
        return Pictures(self.x[rows], self.y[rows], self.scattering)

    def inputs(self, x: Tensor) -> Tensor:
        """What the model reads: pixels moved to about [-2, 2] by public constants, or the maps."""
        return x.float() if self.scattering else (x.float() - 127.5) / 64

    def synthetic(self, count: int = 96, seed: int = 5) -> Tensor:
        """Inputs made from dead leaves: public stand-ins for records."""
        size = 4 * self.x.shape[-1] if self.scattering else self.x.shape[-1]
        leaves = _leaves(count, size, self.planes, seed).to(self.x.device)
        if not self.scattering:
            return self.inputs((leaves * 255).to(torch.uint8))
        return _Front((size, size) if self.planes == 1 else (size, size, self.planes), self.x.device)(leaves)


@functools.lru_cache(maxsize=8)
def _leaves(count: int, size: int, planes: int, seed: int) -> Tensor:
    """The same pictures for every run of a process: they take seconds of several cores."""
    return dead_leaves(count, size, planes, seed=seed)


class _Front(nn.Module):
    """Scattering, per-record normalisation, whitening of channels by dead leaves, root mean square one."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self.map = FeatureMap(_WHITE, shape, device)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        maps = self.map.white_scattering(self.map._raw(x)["scattering"])
        size = math.prod(maps.shape[1:])
        return maps * (size / maps.square().sum((1, 2, 3), keepdim=True).clamp_min(1e-12)).sqrt()


def _network(name: str) -> Network:
    if name not in NETWORKS:
        raise WeightclipError(f"unknown network {name!r}: choose one of {', '.join(NETWORKS)}")
    return NETWORKS[name]


def build(name: str, planes: int, seed: int) -> nn.Module:
    """The network with initial weights that the seed alone decides."""
    with torch.random.fork_rng():  # generators of GPUs too, which manual_seed reaches
        torch.manual_seed(seed)
        return _network(name).make(planes)


def late_layers(model: nn.Module, example: Tensor) -> list[str]:
    """Convolutions on the smallest maps of the network: where exact norms are cheapest."""
    places: dict[str, int] = {}

    def count(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _, __, out: places.__setitem__(path, math.prod(out.shape[2:]))

    convolutions = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    handles = [m.register_forward_hook(count(path)) for path, m in convolutions]
    with torch.no_grad():
        model(example)
    for handle in handles:
        handle.remove()
    return [path for path, number in places.items() if number == min(places.values())]


def layer_norms(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, beta: float = 1.0) -> dict[str, dict[str, Tensor]]:
    """Of each record and layer: ||(U, beta)||, ||delta||, and the gradient's norm, exact and by both cheaper bounds.

    Returns:
        Path -> {"input", "cotangent", "exact", "channel", "free"}, each (records,).
    """
    layers = {p: m for p, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            out.retain_grad()
            seen[path] = (args[0].detach(), out)

        return hook

    handles = [m.register_forward_hook(keep(p)) for p, m in layers.items()]
    logits = model(x)
    logits.backward(loss.gradient(logits.detach(), y))
    for handle in handles:
        handle.remove()
    model.zero_grad()
    found = {}
    for path, (u, out) in seen.items():
        assert out.grad is not None
        delta, module = out.grad, layers[path]
        part = beta if module.bias is not None else 0.0
        size = delta.flatten(1).norm(dim=1)
        if isinstance(module, nn.Conv2d):
            geometry = Geometry(*(tuple(v) for v in (module.kernel_size, module.stride, module.padding,
                                                     module.dilation)), module.groups)  # fmt: skip  # pyright: ignore
            exact, channel, free = (conv_record_norm(u, delta, geometry, part, k) for k in (EXACT, CHANNEL, FREE))
            factor = free / size.clamp_min(1e-30)
        else:
            factor = (u.flatten(1).square().sum(1) + part**2).sqrt()
            exact = channel = free = factor * size
        found[path] = {"input": factor, "cotangent": size, "exact": exact, "channel": channel, "free": free}
    return found
