"""The private criterion: per-record loss, summed; its gradient is the certified one whatever happens upstream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightclip._trees import map_tensors, tensors_of
from weightclip.errors import ContractError
from weightclip.factors._limits import Eager
from weightclip.losses import Loss

if TYPE_CHECKING:
    from weightclip.engine import PrivacyEngine


class _Summed(Eager):
    """Value: sum over records / expected batch size. Backward: the engine collects the certified gradients, once."""

    @staticmethod
    def forward(ctx, hidden: tuple[Tensor, Any], todo: Any, engine: PrivacyEngine, *of: Tensor) -> Tensor:
        value, ctx.shown = hidden
        ctx.todo, ctx.engine = todo, engine
        return value

    @staticmethod
    def backward(ctx, upstream: Tensor):
        if ctx.todo is None:
            raise ContractError("backward() ran twice through one private loss: call the model and the loss again.")
        todo, ctx.todo = ctx.todo, None
        ctx.engine._check_upstream(upstream)
        ctx.engine._collect(*todo)
        return None, None, None, *ctx.shown  # as far as the wall; what the engine collected is all there is


def _per_view(target: Any, records: int, views: int) -> Any:
    """Targets of the views, record after record: those given per record are repeated."""
    if views == 1:
        return target
    if isinstance(target, Tensor):
        return target.repeat_interleave(views, 0) if target.dim() and target.shape[0] == records else target
    return type(target)(_per_view(t, records, views) for t in target) if isinstance(target, (tuple, list)) else target


def _where(mask: Tensor, value: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *(1,) * (value.dim() - 1)), value, torch.zeros_like(value))


def _logits(outputs: Any) -> Tensor:
    """The raw outputs in what a model of transformers returns."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise ContractError(
            f"the private criterion got a {type(outputs).__name__}: give it one tensor of the model's output (such as "
            "out.logits), or make the criterion a function of (outputs, labels) with one value for each record."
        )
    return found


class PrivateCriterion(nn.Module):
    """Wraps the user's criterion. Under ``no_grad`` it is the user's criterion.

    Formal guarantees:
        The gradient that enters the model is, for each record, ``loss.gradient`` at the model's output, zero for
        padding; records are summed, never averaged. What arrives from above must be the declared ``loss_scale`` (1 by
        default), else backward raises: a factor could mix records. Its value depends on the records and is not private.
    """

    def __init__(self, native: Any, loss: Loss, engine: PrivacyEngine) -> None:
        super().__init__()
        self.native = native
        self.__dict__["_engine"], self.__dict__["_loss"] = engine, loss

    @property
    def loss(self) -> Loss:
        """The certified loss; fixed, because bounds were computed for it."""
        return self.__dict__["_loss"]

    def forward(self, outputs: Any, target: Any = None) -> Tensor:
        """The displayed value: sum over records / expected batch size.

        Args:
            outputs: What the model returned, or a part of it: a tensor (also a view of one, with positions folded into
                the rows), an object with ``.logits``, or, for a loss that is a function of the user's own, any tuple,
                mapping or dataclass of tensors.
            target: Labels, in whatever form the loss takes them.
        """
        if not isinstance(outputs, Tensor) and not self.loss.takes_trees:
            outputs = _logits(outputs)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(outputs))):
            return self.native(outputs, target)
        return self._private(outputs, target)  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable
    def _private(self, outputs: Any, target: Any) -> Tensor:
        engine: PrivacyEngine = self.__dict__["_engine"]
        if not isinstance(outputs, Tensor):  # what has no row for each record (a loss of the model's own) stays outside
            records = engine._records()
            outputs = map_tensors(lambda t: t if t.dim() and t.shape[0] == records else None, outputs)
        arguments, mask = engine._begin_loss([t for t in tensors_of(outputs) if t.requires_grad])
        try:
            value, gradients = self.graded(outputs, target, mask, arguments[0].fold)
        except BaseException:
            engine._unreserve()
            raise
        passage = arguments[0].passage
        for argument, gradient in zip(arguments, gradients, strict=True):
            if gradient is not None:
                given = argument.lay_out(gradient)
                known = passage.given.get(argument.end)
                passage.given[argument.end] = given if known is None else known + given
        todo = passage, engine._graded, mask  # hidden from autograd in a tuple
        if passage.compiled:  # no wall there: the user's backward pass must not enter the model's graph
            return _Summed.apply((value, [None]), todo, engine, engine._gate.anchor)  # type: ignore[return-value]
        used = [(a.value, g) for a, g in zip(arguments, gradients, strict=True) if g is not None]
        values, shown = zip(*used, strict=True)
        return _Summed.apply((value, shown), todo, engine, *values)  # type: ignore[return-value]

    @torch.no_grad()
    def graded(
        self, outputs: Any, target: Any, mask: Tensor | None, fold: int = 1
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The displayed value and each record's certified gradient at the model's outputs; padding counts nothing.

        With ``fold`` rows for each record the record's loss is the mean over them, whatever their labels are.
        """
        engine: PrivacyEngine = self.__dict__["_engine"]
        first = outputs if isinstance(outputs, Tensor) else tensors_of(outputs)[0]
        target = _per_view(target, first.shape[0] // (engine.views * fold), engine.views)
        if isinstance(outputs, Tensor):
            values, gradient = self.loss.both(outputs.detach(), target)
            gradients: list[Tensor | None] = [gradient]
        else:
            values, gradients = self.loss.both_of_tree(outputs, target)
        if fold > 1:
            mask = None if mask is None else mask.repeat_interleave(fold)
            values, gradients = values / fold, [g if g is None else g / fold for g in gradients]
        if mask is not None:
            mask = mask.to(values.device)
            gradients = [g if g is None else _where(mask, g) for g in gradients]
            values = _where(mask, values)
        return values.sum() / (engine.expected_batch_size * engine.views), gradients

    def extra_repr(self) -> str:
        """Show the certified loss."""
        return f"loss={self.loss}"
