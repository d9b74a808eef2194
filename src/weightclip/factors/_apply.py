"""The forward of every private product, whichever layer or operator asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weightclip.errors import ContractError
from weightclip.factors._affine import AffineFunction
from weightclip.factors._conv import ConvFunction, laid_as
from weightclip.factors._copies import Copied, plain
from weightclip.factors._dense import DenseFunction
from weightclip.factors._embedding import EmbeddingFunction
from weightclip.factors._limits import as_multiplied, eager_twin, transforming
from weightclip.factors._passes import Passes

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
    if sink is None or not sink.on or (not compiling and transforming()):
        way = None, 0, part._wc_limits
    else:
        if not compiling:
            sink.check(getattr(part, "parameter", part.weight))
        # parameters take no part in autograd: what links this layer to the backward pass is the engine's anchor
        weight, bias = weight.detach(), bias if bias is None else bias.detach()
        way = part._wc_token, sink.key, sink.anchor
        if passes is not None and (isinstance(x, Copied) or (part._wc_lone and passes.is_copy(part, x.dim()))):
            return _copied(function, part, x, weight, bias, passes, (*way, *conf))
    chosen = function if compiling or transforming() else EAGER[function]
    return chosen.apply(x, weight, bias, *way, *conf)


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
