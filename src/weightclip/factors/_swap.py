"""Native layers become private ones by a change of class: same object, same state_dict keys, same isinstance."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip import nn as wnn
from weightclip.errors import CertificationError
from weightclip.factors._affine import AffineFunction
from weightclip.factors._collect import Sink
from weightclip.factors._conv import ConvFunction
from weightclip.factors._dense import DenseFunction
from weightclip.factors._embedding import EmbeddingFunction
from weightclip.factors._kinds import first_of
from weightclip.factors._limits import (
    BOUND,
    CAP,
    COTANGENT,
    KIND_SHIFT,
    RADIUS,
    Product,
    as_multiplied,
    eager_twin,
    is_plain,
    transforming,
)
from weightclip.factors._record_norms import CHEAPEST

_INF = float("inf")
_EAGER: dict[Any, Any] = {f: eager_twin(f) for f in (AffineFunction, ConvFunction, DenseFunction, EmbeddingFunction)}


def _apply(function: Any, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *conf: Any) -> Tensor:
    """The layer's forward: its backward hands both factors to the engine, or returns the limited product (audits)."""
    if not torch.is_grad_enabled():  # no backward to bound; torch.compile could not trace the Function here
        return function.forward(x, weight, bias, None, 0, None, *conf)
    sink = layer._wc_sink
    compiling = torch.compiler.is_compiling()
    if sink is None or not sink.on or (not compiling and transforming()):
        way = None, 0, layer._wc_limits
    else:
        if not compiling:
            sink.check(layer.weight)
        # parameters take no part in autograd: what links this layer to the backward pass is the engine's anchor
        weight, bias = weight.detach(), bias if bias is None else bias.detach()
        way = layer._wc_token, sink.key, sink.anchor
    chosen = function if compiling or transforming() else _EAGER[function]
    return chosen.apply(x, weight, bias, *way, *conf)


class _Private:
    """State of a private layer; its limits are the engine's, not a buffer of the model."""

    _wc_native: type[nn.Module]
    _wc_limits: Tensor
    _wc_flags: int
    _wc_beta: float
    _wc_product: Product
    _wc_kind: int
    _wc_token: Tensor
    _wc_sink: Sink | None = None
    _wc_counter: Any = None

    def _get_name(self) -> str:
        return self._wc_native.__name__

    def _conf(self) -> tuple[Any, ...]:
        return self._wc_flags, self._wc_beta, self._wc_product.dtype, self._wc_product.chunk


class PrivateLinear(_Private, nn.Linear):
    """nn.Linear with bounded factors in its weight gradient."""

    _wc_native = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Native forward."""
        if is_plain():
            return nn.Linear.forward(self, input)
        return _apply(DenseFunction, self, as_multiplied(input), self.weight, self.bias, *self._conf())


class _PrivateConv(_Private):
    """Shared by the convolutions."""

    def _kernel(self) -> Tensor:
        conv: Any = self
        return conv.weight

    def forward(self, input: Tensor) -> Tensor:
        """Native forward; padding that convolution kernels do not know is done first, outside the product."""
        if is_plain():
            return self._wc_native.forward(self, input)  # type: ignore[arg-type]
        conv: Any = self
        padding = conv.padding
        if conv.padding_mode != "zeros":
            input = F.pad(input, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
            padding = (0,) * len(conv.kernel_size)
        elif isinstance(padding, str):
            if padding == "same":
                input = F.pad(input, conv._reversed_padding_repeated_twice)
            padding = (0,) * len(conv.kernel_size)
        zeros = (0,) * len(conv.kernel_size)
        return _apply(
            ConvFunction, self, as_multiplied(input), self._kernel(), conv.bias, *self._conf(), conv.stride, padding,
            conv.dilation, conv.groups, False, zeros,
        )  # fmt: skip


class PrivateConv1d(_PrivateConv, nn.Conv1d):
    """nn.Conv1d with bounded factors."""

    _wc_native = nn.Conv1d


class PrivateConv2d(_PrivateConv, nn.Conv2d):
    """nn.Conv2d with bounded factors."""

    _wc_native = nn.Conv2d


class PrivateConv3d(_PrivateConv, nn.Conv3d):
    """nn.Conv3d with bounded factors."""

    _wc_native = nn.Conv3d


class _InPlaceOf(torch.autograd.Function):
    """The effective kernel, whose gradient lands unchanged in the slot of the parameter it is made from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight, effective):
        """The effective kernel."""
        return effective.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing to keep; where the product goes to the engine there is no gradient to pass on."""
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d):
        """dL/dW-hat in W's slot: the release adds the noise there and pulls it back afterwards."""
        return d, None


class PrivateStandardizedConv2d(_PrivateConv, wnn.StandardizedConv2d):
    """StandardizedConv2d with bounded factors; the gradient of ``weight`` is that of the effective kernel."""

    _wc_native = wnn.StandardizedConv2d

    def _kernel(self) -> Tensor:
        return _InPlaceOf.apply(self.weight, self.effective_weight().detach())  # type: ignore[return-value]


class _PrivateConvTranspose(_Private):
    """Shared by the three transposed convolutions."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Native forward."""
        if is_plain():
            return self._wc_native.forward(self, input, output_size)  # type: ignore[arg-type]
        conv: Any = self
        axes = len(conv.kernel_size)
        extra = conv._output_padding(
            input, output_size, conv.stride, conv.padding, conv.kernel_size, axes, conv.dilation
        )
        return _apply(
            ConvFunction, self, as_multiplied(input), conv.weight, conv.bias, *self._conf(), conv.stride, conv.padding,
            conv.dilation, conv.groups, True, tuple(extra),
        )  # fmt: skip


class PrivateConvTranspose1d(_PrivateConvTranspose, nn.ConvTranspose1d):
    """nn.ConvTranspose1d with bounded factors."""

    _wc_native = nn.ConvTranspose1d


class PrivateConvTranspose2d(_PrivateConvTranspose, nn.ConvTranspose2d):
    """nn.ConvTranspose2d with bounded factors."""

    _wc_native = nn.ConvTranspose2d


class PrivateConvTranspose3d(_PrivateConvTranspose, nn.ConvTranspose3d):
    """nn.ConvTranspose3d with bounded factors."""

    _wc_native = nn.ConvTranspose3d


class PrivateEmbedding(_Private, nn.Embedding):
    """nn.Embedding with bounded factors."""

    _wc_native = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        """Native forward."""
        if is_plain():
            return nn.Embedding.forward(self, input)
        flags, product = self._wc_flags, self._wc_product.dtype
        return _apply(EmbeddingFunction, self, input, self.weight, None, flags, self.padding_idx, product)


class _PrivateNorm(_Private):
    """Shared by normalisation layers: the normalisation itself is native, its affine part is private."""

    def _normalised(self, x: Tensor) -> Tensor:
        layer: Any = self
        return layer.normalise(x)

    def forward(self, input: Tensor) -> Tensor:
        """Native forward."""
        layer: Any = self
        if is_plain() or layer.weight is None:
            return self._wc_native.forward(self, input)  # type: ignore[arg-type]
        x, first = self._normalised(input), first_of(layer, input)
        return _apply(AffineFunction, self, x, layer.weight, layer.bias, self._wc_flags, self._wc_beta, first)


class PrivateSafeGroupNorm(_PrivateNorm, wnn.SafeGroupNorm):
    """SafeGroupNorm with bounded factors."""

    _wc_native = wnn.SafeGroupNorm


class PrivateSafeInstanceNorm(_PrivateNorm, wnn.SafeInstanceNorm):
    """SafeInstanceNorm with bounded factors."""

    _wc_native = wnn.SafeInstanceNorm


class PrivateSafeLayerNorm(_PrivateNorm, wnn.SafeLayerNorm):
    """SafeLayerNorm with bounded factors."""

    _wc_native = wnn.SafeLayerNorm


class PrivateGroupNorm(_PrivateNorm, nn.GroupNorm):
    """nn.GroupNorm with bounded factors."""

    _wc_native = nn.GroupNorm

    def _normalised(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, None, None, self.eps)


class PrivateLayerNorm(_PrivateNorm, nn.LayerNorm):
    """nn.LayerNorm with bounded factors."""

    _wc_native = nn.LayerNorm

    def _normalised(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, None, None, self.eps)


_SWAPS: dict[type, type] = {
    c._wc_native: c
    for c in (
        PrivateLinear, PrivateConv1d, PrivateConv2d, PrivateConv3d, PrivateConvTranspose1d, PrivateConvTranspose2d,
        PrivateConvTranspose3d, PrivateEmbedding, PrivateSafeGroupNorm, PrivateSafeInstanceNorm, PrivateSafeLayerNorm,
        PrivateGroupNorm, PrivateLayerNorm, PrivateStandardizedConv2d,
    )
}  # fmt: skip


def make_layer_private(
    module: nn.Module,
    *,
    radius: float | None = None,
    cotangent: float | None = None,
    cap: float | None = None,
    beta: float = 1.0,
    product: Product | None = None,
    caps: int = CHEAPEST,
    bound: bool = False,
) -> None:
    """Turn one native layer into its private form, in place, with the given limits (None: not enforced).

    ``bound``: the cap stands for a certified bound, which the engine moves with the weights; it meets the product of
    the factors' norms, and ``cap`` is only where it starts.

    Formal guarantees:
        The layer's weight gradient, for each record, is the native one times a number in [0, 1] such that the input
        factor, the cotangent and their product respect the limits that are given. Its output and the gradient it passes
        to earlier layers are the native ones.
    """
    kind = getattr(type(module), "_wc_native", type(module))
    if kind not in _SWAPS:
        raise CertificationError(
            f"{kind.__name__} has no in-product form: cotangent_radius, layer_radius and caps need one. "
            "Fix: use the torch layer itself rather than a subclass."
        )
    module.__class__ = _SWAPS[kind]
    layer: Any = module
    device = next((q.device for q in module.parameters(recurse=False)), torch.device("cpu"))
    values = [_INF if v is None else float(v) for v in (radius, cotangent, cap)]
    # no buffer: casting or moving the model, or writing to its buffers, must not change what is enforced
    module.__dict__["_wc_limits"] = torch.tensor(values, dtype=torch.float32, device=device)
    bits = ((RADIUS, radius), (COTANGENT, cotangent), (CAP, cap))
    layer._wc_flags = sum(bit for bit, value in bits if value is not None)
    if cap is not None:
        layer._wc_flags |= BOUND if bound else int(caps) << KIND_SHIFT
    module.register_buffer("_wc_token", torch.zeros((), device=device), persistent=False)
    chosen = (product or Product()).resolve(module, device)
    layer._wc_beta, layer._wc_product, layer._wc_kind = float(beta), chosen, int(caps)
    layer._wc_sink = layer._wc_counter = None


def make_layer_plain(module: nn.Module) -> None:
    """Undo :func:`make_layer_private`."""
    if isinstance(module, _Private):
        native = module._wc_native
        for name in ("_wc_limits", "_wc_flags", "_wc_beta", "_wc_product", "_wc_kind", "_wc_sink", "_wc_counter"):
            module.__dict__.pop(name, None)
        del module._wc_token
        module.__class__ = native  # type: ignore[assignment]


def is_private(module: nn.Module) -> bool:
    """Whether the layer has its private form."""
    return isinstance(module, _Private)
