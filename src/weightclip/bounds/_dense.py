"""Dense layers (also over positions) and embeddings."""

from __future__ import annotations

import math

from torch import nn

from weightclip.bounds._layer import LayerRule, Numerics, bias_norm, pythagoras, register_layer
from weightclip.bounds._layer_norms import layer_norm_tensor
from weightclip.bounds._rule import Op, Scalar, plus, times


class DenseRule(LayerRule):
    """y = Wx + bias at each of S positions. gain ||W||; a = sqrt(X^2 + beta^2 S)."""

    in_product = True

    def gain(self, module: nn.Module, op: Op, p: float, numerics: Numerics) -> Scalar:
        """Certified ||W||_p of the weights as cast."""
        return layer_norm_tensor(module, p, dtype=numerics.weights) * self.inflation(module, numerics)

    def inflation(self, module: nn.Module, numerics: Numerics) -> float:
        """Rounding of the products Wx and W^T delta."""
        assert isinstance(module, nn.Linear)
        sizes = (module.in_features, module.out_features)
        return numerics.inflate(max(sizes), min(sizes))

    def output(self, module: nn.Module, op: Op, gain: Scalar, x: Scalar) -> Scalar:
        """c X + sqrt(S) ||bias||."""
        return plus(times(gain, x), times(math.sqrt(positions(op)), bias_norm(module)))

    def factor(self, module: nn.Module, op: Op, x: Scalar, beta: float, p: float) -> Scalar:
        """p = 2 and inf: sqrt(X^2 + beta^2 S); p = 1: times sqrt(S n_out)."""
        assert isinstance(module, nn.Linear)
        a2 = pythagoras(module, x, beta * math.sqrt(positions(op)))
        return times(math.sqrt(positions(op) * module.out_features), a2) if p == 1 else a2


def positions(op: Op) -> int:
    """S: how many times the layer is applied within one record."""
    return math.prod(op.shapes[0][:-1])


class EmbeddingRule(LayerRule):
    """Row lookup at S positions. No gradient to the indices; a = sqrt(S), all S may hit one row."""

    in_product = True

    def check(self, module: nn.Module, op: Op) -> None:
        """max_norm changes weights in the forward pass; scale_grad_by_freq counts over the batch."""
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            raise op.refuse("Embedding(max_norm=...) changes weights by the data", "drop max_norm")
        if module.scale_grad_by_freq:
            raise op.refuse("Embedding(scale_grad_by_freq=True) counts over the batch", "set it to False")
        if module.sparse:
            raise op.refuse("sparse gradients would show which rows were used", "set sparse=False")

    def gain(self, module: nn.Module, op: Op, p: float, numerics: Numerics) -> Scalar:
        """Indices have no gradient."""
        return 0.0

    def output(self, module: nn.Module, op: Op, gain: Scalar, x: Scalar) -> Scalar:
        """sqrt(S) times the largest row norm."""
        assert isinstance(module, nn.Embedding)
        rows = module.weight.detach().double().norm(dim=1).max()
        return math.sqrt(math.prod(op.shapes[0])) * rows * (1 + 2.0**-40)

    def factor(self, module: nn.Module, op: Op, x: Scalar, beta: float, p: float) -> Scalar:
        """2 -> 2: sqrt(S); 2 -> inf: 1 (an output entry is one parameter); 2 -> 1: sqrt(numel) sqrt(S)."""
        count = math.prod(op.shapes[0])
        if math.isinf(p):
            return 1.0
        return math.sqrt(count) * (math.sqrt(math.prod(op.out_shape)) if p == 1 else 1.0)


register_layer(nn.Linear, DenseRule())
register_layer(nn.Embedding, EmbeddingRule())
