"""The multi-layer perceptron of the paper's tabular experiments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from weightclip.nn import SafeGroupNorm


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
