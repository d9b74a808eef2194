"""Operator norms of layers: from an ``nn.Linear``, ``nn.Conv*d`` or ``nn.ConvTranspose*d`` to a certified bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from weightclip._torch import ConvNd, ConvTransposeNd, SpectralNorm
from weightclip.bounds._conv_norms import ConvNorm, Size, per_axis
from weightclip.bounds._operator_norms import check_p, dense_norm
from weightclip.errors import CertificationError

_KINDS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class NormFunction(Protocol):
    """A certified norm as a function of the weight alone, the layer's geometry being fixed."""

    # upper bound of the operator norm of a layer with this weight: 0-dim float64, no host synchronisation
    def __call__(self, weight: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class DenseNorm:
    """‖W‖_p of a dense weight."""

    p: float = 2

    def __call__(self, weight: Tensor) -> Tensor:
        return dense_norm(weight, self.p)

    def matrices(self, weight: Tensor) -> Tensor:
        """The weight as (1, out, in)."""
        return weight.unsqueeze(0)

    def overlap(self, weight: Tensor) -> int:
        """√overlap·‖matrices‖₂ bounds the 2-norm: 1 for dense weights."""
        return 1


def norm_function(
    module: nn.Module, p: float = 2, input_size: Size | None = None, *, use_dft: bool = True
) -> DenseNorm | ConvNorm:
    """The certified norm of this layer as a function of its weight.

    Args:
        module: ``nn.Linear``, ``nn.Conv*d`` or ``nn.ConvTranspose*d``, or a subclass that keeps its forward or names
            the weight it uses in a method ``effective_weight()``.
        p: 1, 2 or inf.
        input_size: spatial size of the largest input (convolutions; enables the DFT bound).
        use_dft: whether the DFT bound may be used.
    """
    check_p(p)
    _check_kind(module)
    if isinstance(module, nn.Linear):
        return DenseNorm(p)
    conv = cast(ConvNd, module)
    size = None if input_size is None else per_axis(input_size, len(conv.kernel_size), "input_size")
    transposed = isinstance(conv, ConvTransposeNd)
    return ConvNorm(
        p, tuple(conv.stride), conv.padding if isinstance(conv.padding, str) else tuple(conv.padding),
        tuple(conv.dilation), conv.groups, conv.padding_mode, transposed, tuple(conv.output_padding), size, use_dft,
    )  # fmt: skip


def effective_weight(module: nn.Module) -> Tensor:
    """The weight the layer computes with (``module.weight``, unless the layer names another).

    One that is recomputed behind ``module.weight`` is refused: its present value proves nothing.
    """
    named = getattr(module, "effective_weight", None)
    if callable(named):
        return cast(Tensor, named()).detach()
    kind = type(module).__name__
    if parametrize.is_parametrized(module, "weight"):
        steps = cast(nn.ModuleDict, module.parametrizations)["weight"]
        if module.training and any(isinstance(s, SpectralNorm) for s in cast(nn.ModuleList, steps)):
            raise CertificationError(
                f"{kind} with spectral_norm in training mode changes its weight at every read: call .eval() first"
            )
    elif module._parameters.get("weight") is None:
        raise CertificationError(
            f"{kind} recomputes its weight by a hook, module.weight may be stale: use torch.nn.utils.parametrizations"
        )
    weight = cast(Tensor, module.weight)
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise CertificationError(f"{kind} has no shape yet: run one forward pass before asking for its norm")
    return weight.detach()


def layer_norm_tensor(
    module: nn.Module,
    p: float = 2,
    input_size: Size | None = None,
    *,
    dtype: torch.dtype | None = None,
    use_dft: bool = True,
) -> Tensor:
    """Certified upper bound of a layer's operator norm ‖·‖_p, as a 0-dim float64 tensor, without host synchronisation.

    Args:
        module, p, input_size, use_dft: as :func:`norm_function` takes them.
        dtype: type the forward casts the weight to (autocast); the bound is then that of the cast weight.

    Formal guarantees:
        The result is at least the norm of the linear part of the layer for its present weights (bias excluded); it
        reads nothing but weights and public shapes.
    """
    weight = effective_weight(module)
    function = norm_function(module, p, input_size, use_dft=use_dft)
    return function(weight if dtype is None else weight.to(dtype))


def operator_norm_bound(layer_or_tensor: nn.Module | Tensor, p: float = 2, *, input_size: Size | None = None) -> float:
    """Certified upper bound of an operator norm ‖·‖_p.

    Args:
        layer_or_tensor: ``nn.Linear``, ``nn.Conv*d``, ``nn.ConvTranspose*d``, or a matrix (2-D tensor).
        p: 1, 2 or ``math.inf``.
        input_size: spatial size of the largest input of a convolution; makes its bound tighter.

    Returns:
        A number that is never below the true norm; NaN if a weight is NaN.

    Raises:
        CertificationError: no bound is known for this layer.

    Example:
        >>> import torch
        >>> round(operator_norm_bound(torch.diag(torch.tensor([0.5, 0.25]))), 6)
        0.5
    """
    if isinstance(layer_or_tensor, Tensor):
        if layer_or_tensor.dim() != 2:
            raise CertificationError(
                f"operator_norm_bound of a {layer_or_tensor.dim()}-D tensor: pass a matrix, or the layer it belongs to"
            )
        return float(dense_norm(layer_or_tensor, p))
    return float(layer_norm_tensor(layer_or_tensor, p, input_size))


def _check_kind(module: nn.Module) -> None:
    """A subclass with its own forward may compute anything: it has to name its effective weight."""
    kind = next((k for k in _KINDS if isinstance(module, k)), None)
    if kind is None:
        raise CertificationError(
            f"no operator norm for {type(module).__name__}: expected a Linear, Conv or ConvTranspose layer, or a matrix"
        )
    native = getattr(type(module), "_wc_native", type(module))  # layers swapped by the engine remember their own class
    inner = getattr(native, "_conv_forward", None) is getattr(kind, "_conv_forward", None)
    if (native.forward is not kind.forward or not inner) and not callable(getattr(module, "effective_weight", None)):
        raise CertificationError(
            f"{type(module).__name__} overrides {kind.__name__}.forward: give it a method effective_weight() that "
            "returns the weight it uses"
        )


def is_layer(module: nn.Module) -> bool:
    """Whether the module is a dense or convolutional layer, whose norm ``norm_function`` may know."""
    return isinstance(module, _KINDS)
