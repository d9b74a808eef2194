"""Operators that multiply a parameter with an input: products of their own where a copy for each record is too much.

A layer with a forward of its own (a subclass of nn.Linear, GPT-2's Conv1D, tied weights) calls these with its
parameters; each becomes the product that the native layer has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from weightclip._torch import weight_norm
from weightclip.errors import ContractError
from weightclip.factors._conv import CONV, ConvFunction
from weightclip.factors._copies import ROUTES, Copied, operate
from weightclip.factors._dense import DENSE, DenseFunction
from weightclip.factors._embedding import EMBEDDING, EmbeddingFunction
from weightclip.factors._layers import apply, confs, convolved, multiplied
from weightclip.factors._part import Part, part_of


def _whole(value: Any) -> Part | None:
    """The part behind a copied parameter, if the value is the parameter itself."""
    return value._wc_part if isinstance(value, Copied) else None


def dense(part: Part, x: Tensor) -> Tensor:
    """y = Wx + bias of a dense part."""
    return apply(DenseFunction, part, multiplied(x), part.weight, part.bias, *confs(part))


def _product(x: Any, root: Part, turned: bool) -> Tensor:
    return dense(part_of(root.layer, DENSE, root.name, turned=turned), x)


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    root = _whole(weight)
    if root is None or weight.dim() != 2:
        return NotImplemented
    y = _product(input, root, False)
    return y if bias is None else y + bias


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    root = _whole(mat2)
    if root is None or (beta, alpha) != (1, 1):
        return NotImplemented
    return _product(mat1, root, True) + input


def _matmul(input: Any, other: Any) -> Any:
    root = _whole(other)
    if root is None or other.dim() != 2 or input.dim() < 2:
        return NotImplemented
    return _product(input, root, True)


def _embedding(
    input: Any, weight: Any, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    root = _whole(weight)
    if root is None:
        return NotImplemented
    refuse_odd_embedding(max_norm, scale_grad_by_freq)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    part = part_of(root.layer, EMBEDDING, root.name, padding_idx=padding_idx)
    return apply(EmbeddingFunction, part, input, part.weight, None, part._wc_flags, padding_idx, confs(part)[2])


def refuse_odd_embedding(max_norm: Any, scale_grad_by_freq: bool) -> None:
    """Options under which a table's gradient is not a sum over records."""
    if max_norm is not None or scale_grad_by_freq:
        raise ContractError(
            "an embedding with max_norm writes its table in forward, and scale_grad_by_freq divides by counts of the "
            "batch: leave both options out."
        )


def _tuple(value: Any, axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(value) == 1 else 1)


def _conv(axes: int, transposed: bool) -> Any:
    def route(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, *rest: Any, **named: Any
    ) -> Any:  # fmt: skip
        root = _whole(weight)
        if root is None or input.dim() != axes + 2:
            return NotImplemented
        order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        options = {"output_padding": 0, "groups": 1, "dilation": 1, **dict(zip(order, rest, strict=False)), **named}
        dilation, extra = _tuple(options["dilation"], axes), _tuple(options["output_padding"], axes)
        if isinstance(padding, str):
            if padding == "same":
                reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
                input = F.pad(input, [side for r in reversed(reach) for side in (r // 2, r - r // 2)])
            padding = 0
        part = part_of(root.layer, CONV, root.name)
        sizes = _tuple(stride, axes), _tuple(padding, axes), dilation, options["groups"], transposed, extra
        y = apply(ConvFunction, part, convolved(input, part.weight), part.weight, None, *confs(part), *sizes)
        return y if bias is None else y + bias.reshape(-1, *[1] * axes)

    return route


def _attention(*args: Any, **named: Any) -> Any:
    # under vmap torch does not see that a copied mask asks for a gradient, and takes a kernel that has none
    with sdpa_kernel(SDPBackend.MATH):
        return operate(F.scaled_dot_product_attention, "scaled_dot_product_attention", args, named)


def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    others = [d for d in range(v.dim()) if d != dim % v.dim()] if dim != -1 else list(range(v.dim()))
    return v * (g / v.square().sum(others, keepdim=True).sqrt())


ROUTES[weight_norm] = _weight_norm
ROUTES[F.scaled_dot_product_attention] = _attention
ROUTES[F.linear] = _linear
ROUTES[torch.addmm] = _addmm
for _operator in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
    ROUTES[_operator] = _matmul
ROUTES[F.embedding] = _embedding
for _axes in (1, 2, 3):
    ROUTES[getattr(F, f"conv{_axes}d")] = _conv(_axes, False)
    ROUTES[getattr(F, f"conv_transpose{_axes}d")] = _conv(_axes, True)
