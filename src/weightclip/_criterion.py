"""The private criterion: per-record loss, summed; its gradient is the certified one whatever happens upstream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightclip.errors import ContractError
from weightclip.factors._limits import Eager
from weightclip.losses import Loss

if TYPE_CHECKING:
    from weightclip.engine import PrivacyEngine


class _Summed(Eager):
    """Value: sum over records / expected batch size. Backward: the engine collects the certified gradients, once."""

    @staticmethod
    def forward(ctx, logits: Tensor, hidden: tuple[Tensor, Tensor | None], todo: Any, engine: PrivacyEngine) -> Tensor:
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
        return ctx.shown, None, None, None  # as far as the wall; what the engine collected is all there is


def _per_view(target: Any, records: int, views: int) -> Any:
    """Targets of the views, record after record: those given per record are repeated."""
    if views == 1:
        return target
    if isinstance(target, Tensor):
        return target.repeat_interleave(views, 0) if target.dim() and target.shape[0] == records else target
    return type(target)(_per_view(t, records, views) for t in target) if isinstance(target, (tuple, list)) else target


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

    def forward(self, logits: Tensor, target: Any) -> Tensor:
        """The displayed value: sum over records / expected batch size."""
        if not (torch.is_grad_enabled() and logits.requires_grad):
            return self.native(logits, target)
        return self._private(logits, target)  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable
    def _private(self, logits: Tensor, target: Any) -> Tensor:
        engine: PrivacyEngine = self.__dict__["_engine"]
        passage, mask = engine._begin_loss(logits)
        try:
            value, gradient = self.graded(logits, target, mask)
        except BaseException:
            engine._unreserve()
            raise
        given = passage.given = passage.lay_out(logits, gradient)
        todo = (passage.output, given, engine._graded, mask)  # hidden from autograd in a tuple
        if passage.compiled:  # no wall there: the user's backward pass must not enter the model's graph
            return _Summed.apply(engine._gate.anchor, (value, None), todo, engine)  # type: ignore[return-value]
        return _Summed.apply(logits, (value, gradient), todo, engine)  # type: ignore[return-value]

    @torch.no_grad()
    def graded(self, logits: Tensor, target: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The displayed value and each record's certified gradient at the model's output; padding counts nothing."""
        engine: PrivacyEngine = self.__dict__["_engine"]
        target = _per_view(target, logits.shape[0] // engine.views, engine.views)
        values, gradient = self.loss.both(logits.detach(), target)
        if mask is not None:
            mask = mask.to(gradient.device)
            keep = mask.view(-1, *(1,) * (gradient.dim() - 1))
            gradient = torch.where(keep, gradient, torch.zeros_like(gradient))
            values = torch.where(mask, values, torch.zeros_like(values))
        return values.sum() / (engine.expected_batch_size * engine.views), gradient

    def extra_repr(self) -> str:
        """Show the certified loss."""
        return f"loss={self.loss}"
