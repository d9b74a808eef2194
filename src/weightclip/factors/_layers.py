"""The forward of every private product, and the private forms of the layers of torch with one kind of product each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip import nn as wnn
from weightclip._torch import apply_directly, transforms_active
from weightclip.errors import ContractError
from weightclip.factors._affine import CHANNELS, TRAILING, AffineFunction, first_of
from weightclip.factors._conv import CONV, ConvFunction, laid_as
from weightclip.factors._copies import Copied, plain
from weightclip.factors._dense import DENSE, OUTER, DenseFunction
from weightclip.factors._embedding import EMBEDDING, EmbeddingFunction
from weightclip.factors._limits import as_multiplied, eager_twin, is_plain
from weightclip.factors._part import Part
from weightclip.factors._passes import Passes
from weightclip.factors._swap import FORMS, Private, is_active

EAGER: dict[Any, Any] = {f: eager_twin(f) for f in (AffineFunction, ConvFunction, DenseFunction, EmbeddingFunction)}

_MULTIPLY = (ConvFunction, DenseFunction)


def apply(function: Any, part: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *conf: Any) -> Tensor:
    """The native forward; its backward hands both factors to the engine, or returns the limited product (audits).

    ``part`` is the private layer, or the part of it whose product this is. An input without records (position ids, say)
    is copied for every record, and so is the result (SOUNDNESS section 12).
    """
    sink = part._wc_sink
    passes: Passes | None = None if sink is None else sink.passes
    if passes is not None and passes.noting is not None:
        return _noted(function, part, x, weight, bias, passes, conf)
    if not torch.is_grad_enabled():  # no backward to bound; torch.compile could not trace the Function here
        return function.forward(x, weight, bias, None, 0, None, *conf)
    compiling = torch.compiler.is_compiling()
    usual = not compiling and not transforms_active()
    if sink is None or not sink.on or not (compiling or usual):
        way = None, 0, part._wc_limits
    else:
        if usual:
            sink.check(part.parameter if isinstance(part, Part) else part.weight)
        # parameters take no part in autograd: what links this layer to the backward pass is the engine's anchor
        weight, bias = weight.detach(), bias if bias is None else bias.detach()
        way = part._wc_token, sink.key, sink.anchor
        if passes is not None and (isinstance(x, Copied) or (part._wc_lone and passes.is_copy(part, x.dim()))):
            return _copied(function, part, x, weight, bias, passes, (*way, *conf))
    return (
        apply_directly(EAGER[function], x, weight, bias, *way, *conf)
        if usual
        else function.apply(x, weight, bias, *way, *conf)
    )


def multiplied(x: Tensor) -> Tensor:
    """An input in the type autocast multiplies it in (:func:`as_multiplied`); copies are cast when they are used."""
    return x if isinstance(x, Copied) else as_multiplied(x)


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """The same for a convolution, laid out as its kernel is."""
    return x if isinstance(x, Copied) else laid_as(as_multiplied(x), kernel)


def _copied(
    function: Any, part: Any, x: Tensor, weight: Tensor, bias: Tensor | None, passes: Passes, conf: tuple[Any, ...]
) -> Tensor:
    """The product of an input without records: one for every record."""
    if torch.compiler.is_compiling():
        raise ContractError(f"{_name(part)} runs on an input without records, which needs an uncompiled model.")
    each = x.copies() if isinstance(x, Copied) else x.unsqueeze(0).expand(passes.records, *x.shape)
    each = as_multiplied(each) if function in _MULTIPLY else each
    rows, fixed = each.shape[:2], function in (ConvFunction, AffineFunction)
    if function is AffineFunction and x.dim() == weight.dim():
        raise ContractError(f"{_name(part)} runs on one vector without records: give it a dimension in front.")
    # where dimensions are counted from the front, the input's own first one stays in front, folded into the records
    y = EAGER[function].apply(each.flatten(0, 1) if fixed else each, weight, bias, *conf)
    y = y.unflatten(0, rows) if fixed else y
    return Copied.of(y.detach()[0], passes, passes.place("layer", part), y)


def _noted(
    function: Any, part: Any, x: Tensor, weight: Tensor, bias: Tensor | None, passes: Passes, conf: tuple[Any, ...]
) -> Tensor:
    """A run on public records: the input's shape is noted, and a result without records is followed further."""
    if not passes.deep:
        passes.note(part, x.shape, _name(part))
    y = function.forward(plain(x), weight, bias, None, 0, None, *conf)
    if passes.deep and passes.is_copy(part, x.dim()):
        place = passes.place("layer", part)
        passes.names.setdefault(place, f"the output of {_name(part)}")
        return Copied.of(y, passes, place, None)
    return y


def _name(part: Any) -> str:
    layer = getattr(part, "layer", part)
    name = type(layer)._wc_native.__name__
    return f"a {name} layer" if layer is part else f"parameter '{part.name}' of a {name} layer"


def confs(part: Any) -> tuple[Any, ...]:
    """What every product's Function is told of limits and types."""
    return part._wc_flags, part._wc_beta, part._wc_product.dtype, part._wc_product.chunk


class _Linear(Private):
    """y = Wx + bias."""

    _wc_form = DENSE

    def forward(self, input: Tensor) -> Tensor:
        """Native forward."""
        layer: Any = self
        if is_plain():
            return F.linear(input, layer.weight, layer.bias)
        return apply(DenseFunction, self, multiplied(input), layer.weight, layer.bias, *confs(self))


class _Bilinear(Private):
    """A dense layer on the outer product of two inputs."""

    _wc_form = OUTER

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Native forward."""
        layer: Any = self
        if is_plain():
            return F.bilinear(input1, input2, layer.weight, layer.bias)
        x = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
        return apply(DenseFunction, self, multiplied(x), layer.weight.flatten(1), layer.bias, *confs(self))


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
        y = apply(
            ConvFunction, self, convolved(input, conv.weight), self._kernel(), conv.bias, *confs(self), conv.stride,
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
        return apply(
            ConvFunction, self, convolved(input, conv.weight), conv.weight, conv.bias, *confs(self), conv.stride,
            conv.padding, conv.dilation, conv.groups, True, tuple(extra),
        )  # fmt: skip


class _Embedding(Private):
    """Rows of a table."""

    _wc_form = EMBEDDING

    def _rows(self, input: Tensor) -> Tensor:
        layer: Any = self
        flags, product = self._wc_flags, self._wc_product.dtype
        return apply(EmbeddingFunction, self, input, layer.weight, None, flags, layer.padding_idx, product)

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
        return apply(AffineFunction, self, x, layer.weight, bias, self._wc_flags, self._wc_beta, first)


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
