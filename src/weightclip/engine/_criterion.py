"""The private criterion: per-record loss, summed; its gradient is the certified one whatever happens upstream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightclip._torch import map_tensors, tensors_of
from weightclip.errors import ContractError
from weightclip.factors import Eager
from weightclip.losses import Loss

if TYPE_CHECKING:
    from weightclip.engine._engine import PrivacyEngine
    from weightclip.engine._gate import Passage
    from weightclip.engine._step import Draw, Training


@dataclass
class Taken:
    """A loss that was taken: its value, and what its backward pass collects."""

    value: Tensor
    passage: Passage
    draw: Draw | None
    mask: Tensor | None
    of: tuple[Tensor, ...]  # what it was taken of
    shown: tuple[Tensor | None, ...]  # the gradient there


class _Summed(Eager):
    """Value: sum over records / expected batch size. Backward: the engine collects the certified gradients, once."""

    @staticmethod
    def forward(ctx, loss: Taken, training: Training, *of: Tensor) -> Tensor:
        ctx.loss, ctx.training = loss, training
        return loss.value

    @staticmethod
    def backward(ctx, upstream: Tensor):
        if ctx.loss is None:
            raise ContractError("backward() ran twice through one private loss: call the model and the loss again.")
        loss, ctx.loss = ctx.loss, None
        ctx.training.check_upstream(upstream)
        ctx.training.collect(loss.passage, loss.draw, loss.mask)
        return None, None, *loss.shown  # as far as the wall; what the engine collected is all there is


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
        default), else backward raises: a factor could mix records. Its value depends on the records and is not private;
        with ``shows_values = False`` it is NaN, whatever the records are.
    """

    shows_values = True  # frameworks print and log whatever a loss is worth: integrations turn it off

    def __init__(self, native: Any, loss: Loss, engine: PrivacyEngine) -> None:
        super().__init__()
        self.native = native
        self.__dict__["_engine"], self.__dict__["_loss"] = engine, loss  # not as parts of this module

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
        several = [outputs] if isinstance(outputs, Tensor) else tensors_of(outputs)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in several)):
            return self.native(outputs, target)
        return self._private(outputs, target)  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable
    def _private(self, outputs: Any, target: Any) -> Tensor:
        training = self.__dict__["_engine"].training
        taken = self.take(outputs, target)
        if not self.shows_values:
            taken.value = torch.full_like(taken.value, float("nan"))
        return _Summed.apply(taken, training, *taken.of)  # type: ignore[return-value]

    def take(self, outputs: Any, target: Any) -> Taken:
        """Take the loss of the present batch: admitted, with limits up to date; its backward pass is still to come."""
        training: Training = self.__dict__["_engine"].training
        several = [outputs]
        if not isinstance(outputs, Tensor):  # what has no row for each record (a loss of the model's own) stays outside
            records = training.records
            outputs = map_tensors(lambda t: t if t.dim() and t.shape[0] == records else None, outputs)
            several = [t for t in tensors_of(outputs) if t.requires_grad]
        arguments, mask = training.admit(several)
        try:
            value, gradients = self.graded(outputs, target, mask, arguments[0].fold)
        except BaseException:
            training.give_back()
            raise
        passage = arguments[0].passage
        used = [(a, g) for a, g in zip(arguments, gradients, strict=True) if g is not None]
        for argument, gradient in used:
            given, known = argument.lay_out(gradient), passage.given.get(argument.end)
            passage.given[argument.end] = given if known is None else known + given
        if passage.compiled:  # no wall there: the user's backward pass must not enter the model's graph
            return Taken(value, passage, training.draw, mask, (training.gate.anchor,), (None,))
        of, shown = zip(*((argument.value, gradient) for argument, gradient in used), strict=True)
        return Taken(value, passage, training.draw, mask, of, shown)

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
