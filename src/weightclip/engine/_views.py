"""Whether what a loss is taken of has the records of a model's output on its rows: views by their layout, copies by
what gradients become on the way back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def pulled_back(value: Tensor, edge: GradientEdge, gradient: Tensor) -> Tensor:
    """A gradient through the copies and views between an argument of the loss and the wall."""
    (found,) = torch.autograd.grad(value, [edge], gradient.to(value.dtype), retain_graph=True)  # type: ignore[list-item]
    return found


@dataclass(frozen=True)
class ViewLayout:
    """Where a tensor's entries lie in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> ViewLayout:
        """The layout of ``tensor``."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def grouped(self, fold: int) -> ViewLayout:
        """With ``fold`` rows of each record on a dimension of their own."""
        (n, *shape), (step, *stride) = self.shape, self.stride
        return ViewLayout((n // fold, fold, *shape), (step * fold, step, *stride), self.offset)

    def places(self) -> Tensor:
        """Storage places of the first record's entries, sorted."""
        place = torch.full((1,) * (len(self.shape) - 1), self.offset)
        for axis, (size, step) in enumerate(zip(self.shape[1:], self.stride[1:], strict=True)):
            steps = step * torch.arange(size)
            place = place + steps.view(-1, *(1,) * (len(self.shape) - 2 - axis))
        return place.flatten().sort().values


def keeps_records(view: ViewLayout, output: ViewLayout) -> bool:
    """Whether row i of ``view`` consists of entries of row i of ``output``, each at most once."""
    if view == output:
        return True
    if not view.shape or view.shape[0] != output.shape[0]:
        return False
    if view.shape[0] > 1 and view.stride[0] != output.stride[0]:
        return False
    mine, theirs = view.places(), output.places()
    return bool((mine.diff() > 0).all()) and bool(torch.isin(mine, theirs).all())


def copies_records(value: Tensor, edge: GradientEdge, fold: int) -> bool:
    """The same through copies, by what gradients become: ones, and the digits of each row's record number.

    Digits, because half precision on the way holds no larger number: 128 is exact in all types.
    """
    ones = pulled_back(value, edge, torch.ones_like(value)).double()
    if not bool(((ones == 0) | (ones == 1)).all()):
        return False
    record = torch.arange(value.shape[0], device=value.device).div(fold, rounding_mode="floor")
    mine = torch.arange(ones.shape[0], device=value.device)
    while True:
        given, kept = (_on_rows(1.0 + i % 128, t) for i, t in ((record, value), (mine, ones)))
        if not bool((pulled_back(value, edge, given).double() == ones * kept).all()):
            return False
        record, mine = record // 128, mine // 128
        if not bool(mine.any()):
            return True


def _on_rows(numbers: Tensor, like: Tensor) -> Tensor:
    """One number for each row."""
    return numbers.view(-1, *(1,) * (like.dim() - 1)).expand_as(like)
