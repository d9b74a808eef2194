"""Private forms of the layers of torch whose products are one kind each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip import nn as wnn
from weightclip.errors import ContractError
from weightclip.factors._affine import AffineFunction
from weightclip.factors._apply import apply as _apply
from weightclip.factors._apply import convolved, multiplied
from weightclip.factors._conv import ConvFunction
from weightclip.factors._dense import DenseFunction
from weightclip.factors._embedding import EmbeddingFunction
from weightclip.factors._kinds import CHANNELS, CONV, DENSE, EMBEDDING, OUTER, TRAILING, first_of
from weightclip.factors._limits import is_plain
from weightclip.factors._swap import FORMS, Private, is_active


class _Linear(Private):
    """y = Wx + bias."""

    _wc_form = DENSE

    def forward(self, input: Tensor) -> Tensor:
        """Native forward."""
        layer: Any = self
        if is_plain():
            return F.linear(input, layer.weight, layer.bias)
        return _apply(DenseFunction, self, multiplied(input), layer.weight, layer.bias, *self._conf())


class _Bilinear(Private):
    """A dense layer on the outer product of two inputs."""

    _wc_form = OUTER

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Native forward."""
        layer: Any = self
        if is_plain():
            return F.bilinear(input1, input2, layer.weight, layer.bias)
        x = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
        return _apply(DenseFunction, self, multiplied(x), layer.weight.flatten(1), layer.bias, *self._conf())


class _Conv(Private):
    """Convolutions."""

    _wc_form = CONV

    def _kernel(self) -> Tensor:
        conv: Any = self
        return conv.weight

    def forward(self, input: Tensor) -> Tensor:
        """Native forward; padding that convolution kernels do not know is done first, outside the product."""
        if is_plain():
            return self._wc_native.forward(self, input)  # type: ignore[arg-type]
        conv: Any = self
        axes = len(conv.kernel_size)
        single = input.dim() == axes + 1
        if single:  # one record without a dimension for records, as torch allows
            input = input.unsqueeze(0)
        padding = conv.padding
        if conv.padding_mode != "zeros":
            input = F.pad(input, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
            padding = (0,) * axes
        elif isinstance(padding, str):
            if padding == "same":
                input = F.pad(input, conv._reversed_padding_repeated_twice)
            padding = (0,) * axes
        y = _apply(
            ConvFunction, self, convolved(input, conv.weight), self._kernel(), conv.bias, *self._conf(), conv.stride,
            padding, conv.dilation, conv.groups, False, (0,) * axes,
        )  # fmt: skip
        return y.squeeze(0) if single else y


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


class _StandardizedConv(_Conv):
    """StandardizedConv2d; the gradient of ``weight`` is that of the effective kernel."""

    def _kernel(self) -> Tensor:
        conv: Any = self
        return _InPlaceOf.apply(conv.weight, conv.effective_weight().detach())  # type: ignore[return-value]


class _ConvTranspose(Private):
    """Transposed convolutions."""

    _wc_form = CONV

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
            ConvFunction, self, convolved(input, conv.weight), conv.weight, conv.bias, *self._conf(), conv.stride,
            conv.padding, conv.dilation, conv.groups, True, tuple(extra),
        )  # fmt: skip


class _Embedding(Private):
    """Rows of a table."""

    _wc_form = EMBEDDING

    def _rows(self, input: Tensor) -> Tensor:
        layer: Any = self
        flags, product = self._wc_flags, self._wc_product.dtype
        return _apply(EmbeddingFunction, self, input, layer.weight, None, flags, layer.padding_idx, product)

    def forward(self, input: Tensor) -> Tensor:
        """Native forward."""
        if is_plain():
            return self._wc_native.forward(self, input)  # type: ignore[arg-type]
        return self._rows(input)


class _EmbeddingBag(_Embedding):
    """Rows of a table, then their sum, mean or maximum over each bag."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Native forward, for bags of one length: (records, bag)."""
        layer: Any = self
        if input.dim() != 2 and is_active(self):
            raise ContractError(
                "EmbeddingBag got bags by their offsets, in which rows are no records: pass ids as (records, bag), "
                "padded to a public length with padding_idx."
            )
        if is_plain() or input.dim() != 2:
            return self._wc_native.forward(self, input, offsets, per_sample_weights)  # type: ignore[arg-type]
        rows = self._rows(input)
        counts = torch.ones_like(input, dtype=rows.dtype)
        if layer.padding_idx is not None:
            counts = (input != layer.padding_idx).to(rows.dtype)
        if layer.mode == "max":
            least = torch.where(counts[..., None] > 0, rows, torch.finfo(rows.dtype).min).amax(1)
            return torch.where(counts.sum(1, keepdim=True) > 0, least, 0.0)
        weights = counts if per_sample_weights is None else counts * per_sample_weights
        total = (rows * weights[..., None]).sum(1)
        return total / counts.sum(1, keepdim=True).clamp(min=1) if layer.mode == "mean" else total


class _Norm(Private):
    """Normalisation layers: the normalisation itself is native, its affine part is private."""

    def _normalised(self, x: Tensor) -> Tensor:
        layer: Any = self
        return layer.normalise(x)

    def forward(self, input: Tensor) -> Tensor:
        """Native forward."""
        layer: Any = self
        if is_plain() or layer.weight is None:
            return self._wc_native.forward(self, input)  # type: ignore[arg-type]
        x, first = self._normalised(input), first_of(layer, input)
        bias = getattr(layer, "bias", None)
        return _apply(AffineFunction, self, x, layer.weight, bias, self._wc_flags, self._wc_beta, first)


class _ChannelNorm(_Norm):
    """Parameters on dimension 1."""

    _wc_form = CHANNELS


class _TrailingNorm(_Norm):
    """Parameters on the last dimensions."""

    _wc_form = TRAILING


class _GroupNorm(_ChannelNorm):
    """nn.GroupNorm."""

    def _normalised(self, x: Tensor) -> Tensor:
        layer: Any = self
        return F.group_norm(x, layer.num_groups, None, None, layer.eps)


class _InstanceNorm(_ChannelNorm):
    """nn.InstanceNorm1d, 2d, 3d."""

    def _normalised(self, x: Tensor) -> Tensor:
        layer: Any = self
        mean, variance = layer.running_mean, layer.running_var
        fresh = layer.training or not layer.track_running_stats
        return F.instance_norm(x, mean, variance, None, None, fresh, layer.momentum or 0.0, layer.eps)


class _LayerNorm(_TrailingNorm):
    """nn.LayerNorm."""

    def _normalised(self, x: Tensor) -> Tensor:
        layer: Any = self
        return F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)


class _RMSNorm(_TrailingNorm):
    """nn.RMSNorm."""

    def _normalised(self, x: Tensor) -> Tensor:
        layer: Any = self
        return F.rms_norm(x, layer.normalized_shape, None, layer.eps)


FORMS.update({nn.Linear: _Linear, nn.Bilinear: _Bilinear, nn.Embedding: _Embedding, nn.EmbeddingBag: _EmbeddingBag})
FORMS.update(dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _Conv))
FORMS.update(dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _ConvTranspose))
FORMS.update({wnn.StandardizedConv2d: _StandardizedConv, wnn.SafeLayerNorm: _TrailingNorm})
FORMS.update(dict.fromkeys((wnn.SafeGroupNorm, wnn.SafeInstanceNorm), _ChannelNorm))
FORMS.update({nn.GroupNorm: _GroupNorm, nn.LayerNorm: _LayerNorm, nn.RMSNorm: _RMSNorm})
FORMS.update(dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _InstanceNorm))
