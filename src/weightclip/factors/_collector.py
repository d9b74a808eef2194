"""The collector: every product of every private layer, limited record by record, on its way to the release.

SOUNDNESS section 7. For record i and layer k the products of all uses together are limited to the c_k that the noise of
this release is scaled for, whatever graph, weights, Python state, hooks or loss made the two factors. Layers under the
joint cap share one limit: B_i over all of them (SOUNDNESS section 4), known when the backward pass is over.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightclip.errors import ContractError
from weightclip.factors import _kinds
from weightclip.factors._collect import Sink
from weightclip.factors._limits import BOUND, CAP, cap_scale, no_autocast, record_scale
from weightclip.factors._record_norms import CHEAPEST

_TINY = 1e-30


@dataclass(eq=False)
class Entry:
    """One private layer under a collector.

    Attributes:
        layer: The layer.
        weight: Place of its weight in the release, None if it is not trained; likewise ``bias``.
        uses: How many uses share the layer's limit; those beyond contribute nothing.
        joint: t_k under the joint cap, None for a limit of its own.
        measure: The norm of the certified bound, where it is not the product of l2 norms.
        folds: Rows for each record that its uses may have: what the test of independence has seen (condition b).
    """

    layer: Any
    weight: int | None
    bias: int | None
    uses: int = 1
    joint: float | None = None
    measure: _kinds.Measure | None = None
    folds: frozenset[int] = frozenset({1})  # rows for each record that its uses may have, as the engine has tested
    taken: int = 0
    spent: Tensor | None = None  # what each record has used of the limit in this pass


@dataclass
class _Use:
    """Both factors of one use under the joint cap, kept until the pass is over."""

    entry: Entry
    x: Tensor
    d: Tensor
    conf: tuple[int, ...]


class Limits:
    """The limits of all private layers, in one table, so that those which follow the weights are set in one go.

    Args:
        layers: Private layers in the order of the sensitivities.
        moving: Which of them are limited to their sensitivities; the others keep caps of their own.
        shares: What part of a layer's sensitivity its limit is.

    Formal guarantees:
        A limit is its layer's sensitivity, for which the noise of the same release is scaled, divided by the room for
        rounding that is part of it: norms, scales and sums may round by that much, and still no record moves the
        layer's sum by more than the sensitivity.
    """

    def __init__(self, layers: Sequence[Any], moving: Sequence[bool], shares: Sequence[float]) -> None:
        self.shares = list(shares)
        self.table = torch.stack([layer._wc_limits for layer in layers])
        self.caps = self.table[:, 2]
        self.moving = [i for i, moves in enumerate(moving) if moves]
        self._places = [self.caps[i] for i in self.moving]
        self._constant: Tensor | None = None
        self._mask = torch.tensor(list(moving), device=self.table.device)
        self._shares = torch.tensor(self.shares, dtype=torch.float64, device=self.table.device)
        for layer, row in zip(layers, self.table, strict=True):
            layer.__dict__["_wc_limits"] = row

    @torch.no_grad()
    def set(self, sensitivities: Tensor, constant: bool = False) -> None:
        """Limits of the release with these sensitivities; nothing waits for a device.

        ``constant``: the very same numbers as whenever this tensor comes, so that once is enough.
        """
        if not self.moving or sensitivities is self._constant:  # bounds that no weight enters stay what they are
            return
        if sensitivities.is_cpu:
            values = sensitivities.tolist()
            for i, place in zip(self.moving, self._places, strict=True):
                place.fill_(values[i] * self.shares[i])
            self._constant = sensitivities if constant else None
            return
        self._constant = None
        values = sensitivities * self._shares
        self.caps.copy_(values if len(self.moving) == len(self.shares) else torch.where(self._mask, values, self.caps))


class Collector:
    """Takes both factors of each product, limits every record and adds the sums to the release.

    Args:
        add: Receives (place in the release, sum over records).
        caps: How convolutions under the joint cap measure their gradients.
        drop: Called before a foreign backward pass is refused: what was collected so far must not be released.

    Formal guarantees:
        While a collection is open, the sums handed to ``add`` hold for every record and every layer with a limit c_k of
        its own at most c_k in norm, over all uses of the layer together (weight and beta times bias), and for all
        layers under the joint cap together sum_k ||g_k||^2/t_k^2 <= 1; up to float32 rounding of norms, for which the
        sensitivities allow. A record with a non-finite factor contributes exact zeros. One collection is one backward
        pass over one physical batch whose records are its rows: anything else is refused or adds nothing. Whether a
        record was scaled is private and told to nobody.
    """

    folds = False  # whether rows of one record may follow each other in a product

    def __init__(
        self, add: Callable[[int, Tensor], None], caps: int = CHEAPEST, drop: Callable[[], None] = lambda: None
    ) -> None:
        self.add, self.caps, self.drop, self.entries = add, caps, drop, list[Entry]()
        self.anchor: Tensor | None = None  # a leaf on the layers' device: every product of a pass leads to it
        self.rows: int | None = None  # of the open collection
        self.probe: Callable[[Entry, Tensor, Tensor], None] | None = None  # looks at factors, for tests on public data
        self._joint: list[_Use] = []
        self._mask: Tensor | None = None  # which rows are records; None: all

    def enter(self, entry: Entry) -> Sink:
        """A way for the products of one more layer."""
        self.entries.append(entry)
        if self.anchor is None:
            self.anchor = torch.zeros((), device=entry.layer._wc_token.device, requires_grad=True)
        take = functools.partial(self.take, entry)
        sink = entry.layer._wc_sink = Sink(entry.layer, self.anchor, take)
        return sink

    @contextlib.contextmanager
    def collection(self, rows: int, mask: Tensor | None = None) -> Iterator[None]:
        """One backward pass over a physical batch of ``rows`` records (or views of records).

        Rows whose ``mask`` is False are padding and contribute nothing, whatever a backward pass brings to them.
        """
        self._reset()
        self.rows, self._mask = rows, mask
        try:
            yield
            self._finish()
        finally:
            self.rows = self._mask = None
            self._reset()

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> list[int]:
        """Carry ``gradients`` back from the model's outputs; products go to the open collection.

        Returns:
            Which of the parameters autograd reached all the same, outside their private layers: there must be none.
        """
        assert self.anchor is not None
        wanted = [i for i, p in enumerate(parameters) if p.requires_grad]
        leaves = [*(parameters[i] for i in wanted), self.anchor]
        given = [g.to(output.dtype) for output, g in zip(outputs, gradients, strict=True)]
        found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
        return [i for i, g in zip(wanted, found[:-1], strict=True) if g is not None]

    def _reset(self) -> None:
        self._joint = []
        for entry in self.entries:
            entry.taken, entry.spent = 0, None

    @torch.no_grad()
    def take(self, entry: Entry, x: Tensor, d: Tensor, borrowed: bool = False, conf: Sequence[int] = ()) -> None:
        """The factors of one use; ``borrowed`` ones must not be kept. Outside a collection they are refused."""
        if self.rows is None:
            self.drop()
            raise ContractError(
                "backward() went through a private layer outside the private loss (a penalty on activations, another "
                "loss): only the criterion that make_private returned may train the model. Remove that term."
            )
        if self.probe is not None:
            self.probe(entry, x, d)
            return
        if x.shape[0] != self.rows or d.shape[0] != self.rows:
            raise ContractError(
                f"a {type(entry.layer)._wc_native.__name__} layer ran on {x.shape[0]} rows in a batch of {self.rows} "
                "records: rows of a product must be records. Keep records on dimension 0 (positions behind it)."
            )
        entry.taken += 1
        with no_autocast(d.device.type):
            if self._mask is not None and entry.layer._wc_counter is not None:  # padding has no say in quantiles either
                d = torch.where(self._mask.view(-1, *(1,) * (d.dim() - 1)), d, torch.zeros_like(d))
            if entry.joint is not None:
                kept = (x.clone(), d.clone()) if borrowed else (x.detach(), d.detach())
                self._joint.append(_Use(entry, *kept, tuple(conf)))
            elif entry.taken <= entry.uses:
                self._add(entry, x, d, self._masked(self._scale(entry, x, d, conf), d), conf)

    def _masked(self, scale: Tensor | None, d: Tensor) -> Tensor | None:
        if self._mask is None:
            return scale
        keep = self._mask.to(d.device)
        return keep.float() if scale is None else torch.where(keep, scale, torch.zeros_like(scale))

    def _scale(self, entry: Entry, x: Tensor, d: Tensor, conf: Sequence[int] = ()) -> Tensor | None:
        """Scale of each record, so that all uses of the layer together keep its limit."""
        layer = entry.layer
        if entry.uses == 1 and entry.measure is None:
            return _kinds.scale(layer, x, d, layer._wc_counter, conf)
        limits, flags = layer._wc_limits, layer._wc_flags
        both = _kinds.factors(layer, x, d, conf)
        scale = record_scale(*both, limits, flags & ~CAP, layer._wc_counter)
        if flags & BOUND:
            norm = _kinds.certified(layer, x, d, both, entry.measure, conf)
        else:
            norm = _kinds.norm(layer, x, d, layer._wc_kind, conf)
        left = limits[2] if entry.spent is None else (limits[2] - entry.spent).clamp(min=0)
        scale = cap_scale(scale, norm, *both, left, layer._wc_counter)
        used = torch.where(scale > 0, scale * norm, 0.0)
        entry.spent = used if entry.spent is None else entry.spent + used
        return scale

    @torch.no_grad()
    def _finish(self) -> None:
        """B_i over all layers under the joint cap, then one product per use."""
        uses, self._joint = self._joint, []
        if not uses:
            return
        norms: dict[int, Tensor] = {}
        with no_autocast(uses[0].d.device.type):
            for use in uses:  # several uses of one layer add up before squaring
                key, norm = id(use.entry), _kinds.norm(use.entry.layer, use.x, use.d, self.caps, use.conf)
                norms[key] = norms[key] + norm if key in norms else norm
            thresholds = {id(use.entry): use.entry.joint or 1.0 for use in uses}
            total = torch.stack([(n / thresholds[k]).square() for k, n in norms.items()]).sum(0).sqrt()
            scale = (1.0 / total.clamp(min=_TINY)).clamp(max=1.0)
            scale = self._masked(torch.where(torch.isfinite(total), scale, torch.zeros_like(scale)), total)
            for use in uses:
                self._add(use.entry, use.x, use.d, scale, use.conf)

    def _add(self, entry: Entry, x: Tensor, d: Tensor, scale: Tensor | None, conf: Sequence[int]) -> None:
        for place, total in zip((entry.weight, entry.bias), _kinds.sums(entry.layer, x, d, scale, conf), strict=True):
            if place is not None and total is not None:
                self.add(place, total)
