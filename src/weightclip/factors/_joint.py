"""The joint cap: one scale per record for the gradient of all layers at once (SOUNDNESS section 4).

Each layer's backward hands its two factors to a :class:`JointCap`; when the whole backward pass is over, the norms of
all layers give B_i, and every product is formed once from delta scaled by min(1, 1/B_i). On dense networks with equal
thresholds this is flat per-sample clipping, at the price of ordinary training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from weightclip._torch import ConvNd, after_this_backward, backward_id
from weightclip.factors._affine import affine_record_norm, shaped, summed
from weightclip.factors._conv import by_kernel, conv_product, patch_norm_squared, patch_weights
from weightclip.factors._dense import bias_product, dense_product, position_gram
from weightclip.factors._kernel import dense_gradient, fits, fits_scale, fused_norms, laid_out, weight_gradient
from weightclip.factors._limits import masked, own, squared_norm
from weightclip.factors._record_norms import CHEAPEST, FREE, Geometry, conv_record_norm

_TINY = 1e-30


@dataclass
class _Use:
    """One use of one layer: its two factors."""

    layer: Any
    conf: tuple[Any, ...]
    x: Tensor
    d: Tensor


@dataclass
class JointCap:
    """Collects factors during a backward pass and delivers capped sums when it ends.

    Attributes:
        thresholds: t_k by module.
        deliver: Receives (parameter, summed gradient).
        caps: How convolutions measure their gradients.

    Formal guarantees:
        With g_k the gradient of layer k delivered for one record (bias times beta), sum_k ||g_k||^2/t_k^2 <= 1 whatever
        the record, up to float32 rounding of norms; a record with a non-finite factor contributes zero.
    """

    thresholds: Mapping[nn.Module, float]
    deliver: Callable[[nn.Parameter, Tensor], None]
    caps: int = CHEAPEST
    uses: list[_Use] = field(default_factory=list)
    task: int = -1

    def add(self, use: _Use) -> None:
        """Called inside a layer's backward."""
        task = backward_id()
        if not self.uses or task != self.task:  # factors left by a backward pass that failed are dropped
            self.uses, self.task = [], task
            after_this_backward(self.finish)
        self.uses.append(use)

    @torch.no_grad()
    def finish(self) -> None:
        """B_i over all layers, then one product per use."""
        uses, self.uses = self.uses, []
        norms: dict[int, Tensor] = {}
        for use in uses:  # several uses of one layer add up before squaring
            key = id(use.layer)
            norm = _record_norm(use, self.caps)
            norms[key] = norms[key] + norm if key in norms else norm
        thresholds = {id(use.layer): self.thresholds[use.layer] for use in uses}
        total = torch.stack([(n / thresholds[k]).square() for k, n in norms.items()]).sum(0).sqrt()
        scale = (1.0 / total.clamp(min=_TINY)).clamp(max=1.0)
        scale = torch.where(torch.isfinite(total), scale, torch.zeros_like(scale))
        for use in uses:
            for parameter, gradient in _products(use, scale):
                self.deliver(cast(nn.Parameter, parameter), gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied model trains on its own

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


class _Stash(torch.autograd.Function):
    """Native forward; backward hands the factors on and returns the ordinary input gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer, conf):
        ctx.save_for_backward(x)
        ctx.layer, ctx.conf = layer, conf
        return own(_native(layer, x, conf))

    @staticmethod
    def backward(ctx, d):
        (x,) = ctx.saved_tensors
        ctx.layer._wc_joint.add(_Use(ctx.layer, ctx.conf, x.detach(), d.detach()))
        gx = None
        if ctx.needs_input_grad[0]:
            with torch.autocast(d.device.type, enabled=False):
                gx = _input_gradient(ctx.layer, x, d, ctx.conf).to(x.dtype)
        return gx, None, None, None, None


def _joint_forward(layer: Any, x: Tensor, conf: tuple[Any, ...] = ()) -> Tensor:
    """The layer's forward with its factors going to the joint cap (breaks compiled graphs, results are the same)."""
    return _Stash.apply(x, layer.weight, getattr(layer, "bias", None), layer, conf)  # type: ignore[return-value]


joint_forward: Any = torch.compiler.disable(_joint_forward)


def _native(layer: Any, x: Tensor, conf: tuple[Any, ...]) -> Tensor:
    if isinstance(layer, nn.Linear):
        return torch.nn.functional.linear(x, layer.weight, layer.bias)
    if isinstance(layer, nn.Embedding):
        return torch.nn.functional.embedding(x, layer.weight, layer.padding_idx)
    if isinstance(layer, ConvNd):
        stride, padding, dilation, groups, transposed, extra = conf
        return torch.convolution(x, _kernel(layer), layer.bias, stride, padding, dilation, transposed, extra, groups)
    y = x * shaped(layer.weight, x, conf[0]).to(x.dtype)
    return y if layer.bias is None else y + shaped(layer.bias, x, conf[0]).to(x.dtype)


def _kernel(layer: Any) -> Tensor:
    """The kernel the layer convolves with: W-hat of a standardised one, whose gradient is collected in W's place."""
    return layer.effective_weight() if hasattr(layer, "effective_weight") else layer.weight


def _input_gradient(layer: Any, x: Tensor, d: Tensor, conf: tuple[Any, ...]) -> Tensor:
    weight = _kernel(layer).to(d.dtype)
    if isinstance(layer, nn.Linear):
        return d @ weight
    if isinstance(layer, ConvNd):
        stride, padding, dilation, groups, transposed, extra = conf
        return torch.ops.aten.convolution_backward(
            d, x.to(d.dtype), weight, None, stride, padding, dilation, transposed, extra, groups, (True, False, False)
        )[0]
    return d * shaped(weight, d, conf[0])


def _record_norm(use: _Use, caps: int) -> Tensor:
    """Norm (exact, or an upper bound) of each record's gradient of this use, beta on the bias."""
    layer, x, d = use.layer, use.x, use.d
    beta = layer._wc_beta if getattr(layer, "bias", None) is not None and layer.bias.requires_grad else 0.0
    product = layer._wc_product.dtype
    if isinstance(layer, nn.Linear):
        if math.prod(x.shape[1:-1]) > 1:
            return position_gram(x, d, beta, product)
        if fits_scale(x, d, 1):
            return fused_norms(x, d, beta**2)
        return (squared_norm(x) + beta**2).sqrt() * squared_norm(d).sqrt()
    if isinstance(layer, nn.Embedding):
        return squared_norm(d).sqrt() * math.sqrt(max(1, math.prod(x.shape[1:])))
    if isinstance(layer, ConvNd):
        stride, padding, dilation, groups, transposed, _ = use.conf
        kernel, out = tuple(layer.kernel_size), tuple(d.shape[2:])
        if caps == FREE and not transposed and fits_scale(x, d, 1):
            counts = patch_weights(x, out, kernel, stride, dilation, padding)
            return fused_norms(x, d, beta**2 * math.prod(out), counts)
        d_norm = squared_norm(d).sqrt()
        if transposed:
            m = math.prod(-(-k // (s // math.gcd(s, e))) for k, s, e in zip(kernel, stride, dilation, strict=True))
            return (m * squared_norm(x) + beta**2 * math.prod(out)).sqrt() * d_norm
        if caps == FREE:
            squares = patch_norm_squared(x, out, kernel, stride, dilation, padding)
            return (squares + beta**2 * math.prod(out)).sqrt() * d_norm
        geometry = Geometry(kernel, tuple(stride), tuple(padding), tuple(dilation), groups)
        return conv_record_norm(x, d, geometry, beta, caps, product)
    first = use.conf[0]
    dims = [k for k in range(1, x.dim()) if not first <= k < first + layer.weight.dim()]
    return affine_record_norm(x, d, dims, beta)


def _products(use: _Use, scale: Tensor):
    layer, x, d = use.layer, use.x, use.d
    dtype, chunk = layer._wc_product.dtype, layer._wc_product.chunk
    train_weight = layer.weight.requires_grad
    train_bias = getattr(layer, "bias", None) is not None and layer.bias.requires_grad
    if isinstance(layer, nn.Linear):
        if train_weight and dtype == torch.float64 and fits(x, d):
            yield from _both(layer, *dense_gradient(x, d, scale, train_bias))
            return
        if train_weight:
            yield layer.weight, dense_product(x, d, scale, dtype, chunk)
        if train_bias:
            yield layer.bias, bias_product(d, scale, dtype)
    elif isinstance(layer, nn.Embedding):
        rows, skip = layer.weight.shape[0], -1 if layer.padding_idx is None else layer.padding_idx
        values = masked(d, scale, True).to(dtype)
        yield layer.weight, torch.ops.aten.embedding_dense_backward(values, x, rows, skip, False)
    elif isinstance(layer, ConvNd):
        stride, padding, dilation, groups, transposed, extra = use.conf
        if train_weight and dtype == torch.float64 and by_kernel(x, d, groups, transposed):
            kernel = layer.weight.shape[2:]
            yield from _both(layer, *weight_gradient(x, d, scale, kernel, stride, padding, dilation, train_bias))
            return
        if train_weight:
            conf = (stride, padding, dilation, groups)
            yield layer.weight, conv_product(x, d, scale, layer.weight, conf, dtype, chunk, transposed, extra)
        if train_bias:
            yield layer.bias, masked(d, scale, True).flatten(2).sum(2, dtype=torch.float64).sum(0)
    else:
        first = use.conf[0]
        ds, xs = masked(d, scale, True), masked(x, scale, False)
        if train_weight:
            yield layer.weight, summed(ds * xs, layer.weight.shape, first)
        if train_bias:
            yield layer.bias, summed(ds, layer.weight.shape, first)


def _both(layer: Any, weight: Tensor, bias: Tensor | None):
    yield layer.weight, laid_out(weight, layer.weight)
    if bias is not None:
        yield layer.bias, bias
