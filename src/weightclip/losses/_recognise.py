"""From the user's criterion to a loss that knows its bound."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from weightclip._torch import tensors_of
from weightclip.errors import ContractError
from weightclip.losses._base import Loss, _alike
from weightclip.losses._cross_entropy import CrossEntropy
from weightclip.losses._custom import PerRecordLoss
from weightclip.losses._elementwise import L1, BCEWithLogits, Huber, MultiMargin, SmoothL1


def _multi_margin(c: Any) -> Loss:
    if c.p != 1:
        raise ContractError("MultiMarginLoss with p = 2 has no gradient bound; use p=1")
    return MultiMargin(margin=c.margin, class_weights=c.weight)


_KNOWN: dict[type, Callable[[Any], Loss]] = {
    nn.CrossEntropyLoss: lambda c: CrossEntropy(
        smoothing=c.label_smoothing, class_weights=c.weight, ignore_index=c.ignore_index
    ),
    nn.BCEWithLogitsLoss: lambda c: BCEWithLogits(pos_weight=c.pos_weight, weight=c.weight),
    nn.MultiMarginLoss: _multi_margin,
    nn.HuberLoss: lambda c: Huber(delta=c.delta),
    nn.SmoothL1Loss: lambda c: L1() if c.beta == 0 else SmoothL1(beta=c.beta),
    nn.L1Loss: lambda c: L1(),
}

_REFUSED: dict[type, str] = {
    nn.NLLLoss: "it needs log_softmax outside of it; return raw logits and use CrossEntropyLoss",
    nn.BCELoss: "its gradient is unbounded at 0 and 1; return raw logits and use BCEWithLogitsLoss",
    nn.MSELoss: "its gradient is unbounded; use weightclip.losses.MSE(output_bound=, target_bound=) or HuberLoss",
}

_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.l1_loss: nn.L1Loss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.mse_loss: nn.MSELoss,
}


def _record_by_record(criterion: Any) -> Callable[[Any, Any], Any]:
    """One value for each record: the mean over its own outputs or positions, which are as many for every record."""
    unreduced: Any = criterion
    if isinstance(criterion, nn.Module) and hasattr(criterion, "reduction"):
        unreduced = copy.deepcopy(criterion)
        unreduced.reduction = "none"

    def values(z: Any, y: Any) -> Any:
        if unreduced is not criterion and isinstance(y, Tensor) and y.is_floating_point() and _alike(y, z):
            y = y.reshape(z.shape)  # (N,) for (N, 1): torch would broadcast records against each other
        found = unreduced(z, y)
        own = isinstance(found, Tensor) and found.dim() > 1 and found.shape[0] == tensors_of(z)[0].shape[0]
        return found.flatten(1).mean(1) if own else found

    return values


def recognise(criterion: Any, limited: bool = False) -> Loss:
    """Give the loss that equals the user's criterion, record by record; with a known bound, unless ``limited``.

    Args:
        criterion: one of our losses (returned unchanged), a torch.nn loss with any reduction, or the function of
            torch.nn.functional behind it (also as functools.partial with keyword options).
        limited: every layer of the model has a limit that needs no bound of the loss: any loss whose values can be had
            record by record is taken (a torch.nn loss with a ``reduction``, or a function that returns one value for
            each record).

    Raises:
        ContractError: if the criterion is unknown or has no gradient bound; the message names the way out.
    """
    if isinstance(criterion, Loss):
        return criterion
    name = getattr(criterion, "__name__", type(criterion).__name__)
    if isinstance(criterion, type):
        if issubclass(criterion, (Loss, nn.Module)):
            raise ContractError(f"criterion: {name} is a class; pass an instance, {name}(...)")
    else:
        function, options = criterion, {}
        if isinstance(criterion, partial) and not criterion.args:
            function, options = criterion.func, criterion.keywords
        module = _FUNCTIONS.get(function) if callable(function) and not isinstance(function, nn.Module) else None
        if module is not None:
            try:
                criterion = module(**options)
            except TypeError as error:
                raise ContractError(f"criterion: options {sorted(options)} of {module.__name__}: {error}") from None
        # Exact types only: a subclass may compute something else.
        if limited and type(criterion) not in _KNOWN and callable(criterion):
            return PerRecordLoss(_record_by_record(criterion), trees=not isinstance(criterion, nn.Module))
        if type(criterion) in _REFUSED:
            raise ContractError(f"criterion: {type(criterion).__name__} is refused: {_REFUSED[type(criterion)]}")
        if type(criterion) in _KNOWN:
            return _KNOWN[type(criterion)](criterion)
    raise ContractError(
        f"criterion: {name} has no known gradient bound; wrap a per-record function as wc.PerRecordLoss(fn, bound=...)"
    )
