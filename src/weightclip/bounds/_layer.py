"""Rules of layers with parameters: gain, output bound, and the parameter factor a_k (SOUNDNESS section 3)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightclip.bounds._rule import Op, Scalar, computes_like, plus, root, times


@dataclass(frozen=True)
class Numerics:
    """How the forward and backward passes round (SOUNDNESS section 6).

    Attributes:
        weights: Type the weights are cast to inside the product (autocast), from which norms are taken.
        operand: Relative rounding of each operand before a product (0 where operands keep float32 or better).
        accumulate: Unit roundoff of the sums inside a product.
    """

    weights: torch.dtype = torch.float32
    operand: float = 0.0
    accumulate: float = 2.0**-24

    def inflate(self, terms: int, rank: int) -> float:
        """Factor by which one product's computed norm may exceed its exact bound, ``terms`` summands per entry.

        |fl(Wx) - Wx| <= n u |W||x| entrywise and the l2 norm of |W| is at most sqrt(rank) times that of W.
        """
        return (1 + self.operand) ** 3 * (1 + terms * self.accumulate * math.sqrt(rank))


class LayerRule(ABC):
    """What one kind of layer with parameters does to norms."""

    #: True when ``weightclip.factors`` has an in-product form of this layer, so that radii and caps can be enforced.
    in_product: bool = False

    def check(self, module: nn.Module, op: Op) -> None:  # noqa: B027 - most kinds have nothing to refuse
        """Refuse options without a rule, by name."""

    @abstractmethod
    def gain(self, module: nn.Module, op: Op, p: float, numerics: Numerics) -> Scalar:
        """Certified Lipschitz constant, input to output, in the p-norm, of the weights as they are now."""

    def inflation(self, module: nn.Module, numerics: Numerics) -> float:
        """Factor on the exact gain for the rounding of the layer's own products."""
        return numerics.inflate(8, 1)

    @abstractmethod
    def output(self, module: nn.Module, op: Op, gain: Scalar, x: Scalar) -> Scalar:
        """l2 bound of the output, from the l2 gain and the l2 bound ``x`` of the input."""

    @abstractmethod
    def factor(self, module: nn.Module, op: Op, x: Scalar, beta: float, p: float) -> Scalar:
        """a_k: bound of the (2 -> p) norm of the output's derivative in the parameters (weight, beta * bias)."""

    def dimension(self, module: nn.Module) -> int:
        """d_k: number of trainable parameters."""
        return sum(q.numel() for q in module.parameters(recurse=False) if q.requires_grad)


_LAYERS: dict[type, LayerRule] = {}


def register_layer(kind: type, rule: LayerRule) -> None:
    """Register the rule of a layer type with parameters."""
    _LAYERS[kind] = rule


def layer_rule(module: nn.Module) -> LayerRule | None:
    """The rule of a layer's type, unless a subclass changes what it computes (then its inner operators are seen)."""
    for kind in type(module).__mro__:
        if kind in _LAYERS:
            return _LAYERS[kind] if computes_like(module, kind) else None
    return None


def is_trainable(module: nn.Module, name: str) -> bool:
    """Whether the parameter exists and takes part in training."""
    value = getattr(module, name, None)
    return isinstance(value, Tensor) and value.requires_grad


def bias_norm(module: nn.Module) -> Scalar:
    """l2 norm of the bias, a little enlarged against rounding; 0 without one."""
    bias = getattr(module, "bias", None)
    if bias is None:
        return 0.0
    norm = torch.linalg.vector_norm(bias.detach(), dtype=torch.float64)
    return (float(norm) if norm.device.type == "cpu" else norm) * (1 + 2.0**-40)


def pythagoras(module: nn.Module, weight_part: Scalar, bias_part: float) -> Scalar:
    """sqrt(weight_part^2 [weight trains] + bias_part^2 [bias trains])."""
    parts: list[Scalar] = []
    if is_trainable(module, "weight"):
        parts.append(times(weight_part, weight_part))
    if is_trainable(module, "bias"):
        parts.append(bias_part**2)
    return root(plus(0.0, *parts))
