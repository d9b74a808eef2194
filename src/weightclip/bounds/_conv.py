"""Convolutions in one, two and three dimensions, plain and transposed."""

from __future__ import annotations

import math
from typing import cast

from torch import nn

from weightclip import nn as wnn
from weightclip._torch import ConvNd, ConvTransposeNd
from weightclip.bounds._conv_norms import overlap
from weightclip.bounds._dense import DenseRule
from weightclip.bounds._layer import LayerRule, Numerics, bias_norm, layer_rule, pythagoras, register_layer
from weightclip.bounds._layer_norms import layer_norm_tensor
from weightclip.bounds._rule import Op, Scalar, plus, times
from weightclip.errors import CertificationError


def kernel_overlap(module: ConvNd) -> int:
    """m: in how many output positions one input entry meets the same kernel entry's residue class (SOUNDNESS 3)."""
    return overlap(module.kernel_size, module.stride, module.dilation)


class ConvRule(LayerRule):
    """gain: least certified bound; a = sqrt(m X^2 + beta^2 P), P the output positions."""

    in_product = True

    def check(self, module: nn.Module, op: Op) -> None:
        """Reflect and replicate padding have no rule (circular is checked by the norm itself)."""
        conv = cast(ConvNd, module)
        if conv.padding_mode not in ("zeros", "circular"):
            raise op.refuse(f"padding_mode='{conv.padding_mode}' has no rule", "use padding_mode='zeros'")
        if len(op.shapes[0]) != len(conv.kernel_size) + 1:
            raise op.refuse("the input has no record dimension", "pass batches: records on dimension 0")
        if conv.padding_mode == "circular":
            try:
                self.gain(module, op, math.inf, Numerics())
            except CertificationError as error:
                raise op.refuse(str(error), "use padding_mode='zeros'") from None

    def gain(self, module: nn.Module, op: Op, p: float, numerics: Numerics) -> Scalar:
        """Certified operator norm of the kernel as cast, at the certified input size."""
        dft = getattr(module, "_wc_dft", True)
        norm = layer_norm_tensor(module, p, op.shapes[0][1:], dtype=numerics.weights, use_dft=dft)
        return norm * self.inflation(module, numerics)

    def inflation(self, module: nn.Module, numerics: Numerics) -> float:
        """Rounding of the convolution and of its transpose."""
        conv = cast(ConvNd, module)
        fan = math.prod(conv.kernel_size) * max(conv.in_channels, conv.out_channels) // conv.groups
        rank = min(conv.out_channels, conv.in_channels * math.prod(conv.kernel_size)) // conv.groups
        return numerics.inflate(fan, max(1, rank))

    def output(self, module: nn.Module, op: Op, gain: Scalar, x: Scalar) -> Scalar:
        """c X + sqrt(P) ||bias||."""
        return plus(times(gain, x), times(math.sqrt(math.prod(op.out_shape[1:])), bias_norm(module)))

    def factor(self, module: nn.Module, op: Op, x: Scalar, beta: float, p: float) -> Scalar:
        """2 -> 2 sqrt(m X^2 + beta^2 P); 2 -> inf sqrt(X^2 + beta^2) (one patch); 2 -> 1 times sqrt(c_out P)."""
        conv = cast(ConvNd, module)
        count = math.prod(op.out_shape[1:])
        if math.isinf(p):
            return pythagoras(module, times(math.sqrt(_repeats(conv, op.shapes[0][1:])), x), beta)
        a2 = pythagoras(module, times(math.sqrt(kernel_overlap(conv)), x), beta * math.sqrt(count))
        return times(math.sqrt(conv.out_channels * count), a2) if p == 1 else a2


def _repeats(conv: ConvNd, sizes: tuple[int, ...]) -> int:
    """How often one patch may hold one entry: more than once where a circular kernel wraps around its input."""
    if conv.padding_mode != "circular":
        return 1
    axes = zip(sizes, conv.kernel_size, conv.dilation, strict=True)
    return math.prod(-(-k // (n // math.gcd(n, d))) for n, k, d in axes)


class ConvTransposeRule(ConvRule):
    """Same m and factors; the operator is the transpose of a convolution."""

    def check(self, module: nn.Module, op: Op) -> None:
        """The norm is that of the output size the module itself declares."""
        super().check(module, op)
        conv = cast(ConvTransposeNd, module)
        axes = zip(op.shapes[0][1:], conv.kernel_size, conv.stride, conv.dilation, conv.padding, conv.output_padding,
                   strict=True)  # fmt: skip
        declared = tuple((n - 1) * s + d * (k - 1) + 1 - 2 * int(e) + o for n, k, s, d, e, o in axes)
        if declared != op.out_shape[1:]:
            raise op.refuse("it is called with an output_size of its own", "set output_padding on the module")

    def factor(self, module: nn.Module, op: Op, x: Scalar, beta: float, p: float) -> Scalar:
        """Fallbacks of SOUNDNESS 3: a^(inf) <= a^(2), a^(1) <= sqrt(numel) a^(2)."""
        return super().factor(module, op, x, beta, 2 if math.isinf(p) else p)


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_layer(_kind, ConvRule())
for _kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register_layer(_kind, ConvTransposeRule())
# A convolution whose parameter is its effective kernel W-hat (SOUNDNESS 3, reparametrised weights). The gain is that of
# W-hat, the factor is that of a convolution, and the sensitivity bounds dL/dW-hat, which has as many entries as W: the
# noise belongs there, and the release pulls it back through the public Jacobian.
register_layer(wnn.StandardizedConv2d, ConvRule())


def gain_is_norm(module: nn.Module) -> bool:
    """Whether this is a dense or convolutional layer whose gain, by a rule of this package, is a norm of its weight.

    Such norms can be found for many layers at once, and moved weights move them by no more than the norm of the move.
    A rule of a user's own (:func:`register_layer`) may say anything.
    """
    return type(layer_rule(module)) in (DenseRule, ConvRule, ConvTransposeRule)
