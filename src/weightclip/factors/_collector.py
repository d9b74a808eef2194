"""The collector: every product of every private layer, limited record by record, on its way to the release.

SOUNDNESS section 7. For record i and layer k the products of all uses together are limited to the c_k that the noise of
this release is scaled for, whatever graph, weights, Python state, hooks or loss made the two factors. Layers under the
joint cap share one limit: B_i over all of them (SOUNDNESS section 4), known when the backward pass is over.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightclip._device import wake_backward_thread
from weightclip._torch import gradients_at
from weightclip.errors import ContractError
from weightclip.factors._affine import CHANNELS
from weightclip.factors._conv import CONV
from weightclip.factors._joint import norm_over
from weightclip.factors._kind import Measure
from weightclip.factors._limits import (
    BOUND,
    CAP,
    COTANGENT,
    RADIUS,
    beta_of,
    cap_scale,
    no_autocast,
    record_scale,
    within_one,
)
from weightclip.factors._own import Own
from weightclip.factors._part import COPIED, Part
from weightclip.factors._passes import RECORDS, Layout, Passes, RowTable, Sink
from weightclip.factors._record_norms import CHEAPEST
from weightclip.factors.kernels._tiles import FEWEST, fits_tiles

_NAMES = ("weight", "bias")


@dataclass(eq=False)
class Entry:
    """One private layer under a collector.

    Attributes:
        layer: The layer.
        weight: Place of its weight in the release, None if it is not trained; likewise ``bias``.
        uses: How many uses share the layer's limit; those beyond contribute nothing. 0: any number (under a cap).
        joint: t_k under the joint cap, None for a limit of its own.
        measure: The norm of the certified bound, where it is not the product of l2 norms.
        others: Places of other parameters (of other names, or of tied layers), by their id.
        tied: Other layers that hold parameters of this one: they share its limit.
    """

    layer: Any
    weight: int | None
    bias: int | None
    uses: int = 1
    joint: float | None = None
    measure: Measure | None = None
    others: Mapping[int, int] = field(default_factory=dict)
    tied: Sequence[Any] = ()
    taken: int = 0
    spent: Tensor | None = None  # what each record has used of the limit in this pass

    @classmethod
    def of(
        cls, layer: Any, places: Mapping[int, int], uses: int = 1, joint: float | None = None,
        measure: Measure | None = None, tied: Sequence[Any] = (),
    ) -> Entry:  # fmt: skip
        """The entry of a layer whose parameters lie at ``places``, by their id."""
        weight, bias = (places.get(id(layer._parameters.get(name))) for name in ("weight", "bias"))
        return cls(layer, weight, bias, uses, joint, measure, places, tied)

    def place(self, layer: Any, name: str) -> int | None:
        """Place of a layer's parameter in the release."""
        if layer is self.layer and name in ("weight", "bias"):
            return self.weight if name == "weight" else self.bias
        return self.others.get(id(layer._parameters[name]))

    def places(self) -> set[int]:
        """Places of all its parameters that are trained."""
        mine = (p for layer in (self.layer, *self.tied) for p in layer.parameters(recurse=False))
        return {self.others[id(p)] for p in mine if id(p) in self.others}

    def capped(self) -> bool:
        """Whether a cap of its own, which follows no quantile, is the layer's only limit."""
        flags = self.layer._wc_flags
        return bool(flags & CAP) and not flags & (BOUND | RADIUS | COTANGENT) and self.layer._wc_counter is None

    def certified(self) -> bool:
        """Whether its cap is a certified bound."""
        return bool(self.layer._wc_flags & BOUND)

    def waits(self) -> bool:
        """Whether the limit is on all uses together, known when the pass is over."""
        return self.joint is not None or (self.uses != 1 and self.capped())


@dataclass
class Use:
    """Both factors of one use, kept until the pass is over. Records on dimension 0, each with ``m`` rows."""

    entry: Any
    part: Any
    x: Tensor
    d: Tensor
    conf: Sequence[int]
    m: int = 1
    own: Own | None = None  # its records' gradients, if they were formed for their norms

    @property
    def turned(self) -> bool:
        """Whether the parameter is the transposed weight of the product."""
        return getattr(self.part, "turned", False)

    def grouped(self) -> tuple[Tensor, Tensor, Sequence[int]]:
        """The factors with one row for each record."""
        if self.m == 1:
            return self.x, self.d, self.conf
        return self.part._wc_form.grouped(self.x, self.d, self.conf, self.m)

    def norm(self, way: int) -> Tensor:
        """Norm of each record's gradient of this use alone; keeps the gradients themselves, if they were formed."""
        x, d, conf = self.grouped()
        self.own = self.part._wc_form.own(self.part, x, d, conf, way)
        if self.own is not None:
            return self.own.norm(beta_of(self.part))
        return self.part._wc_form.norm(self.part, x, d, way, conf)

    def cut(self) -> bool:
        """Whether tiles may form its sum from operands cut to TF32, which norms in float64 know nothing of."""
        return self.part._wc_form is CONV and self.x.dtype == torch.float32 and fits_tiles(self.x, self.d, FEWEST, True)

    def scaled(self, scale: Tensor | None, wide: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """Sums over records for these scales of records; ``wide``: in float64, since other uses may cancel this one."""
        if self.own is not None:
            return self.own.sums(scale, self.part.weight)
        x, d, conf, rows = self.x, self.d, self.conf, scale
        if self.m > 1 and self.part._wc_product.group:  # rows of a record may cancel: one product for all of them
            x, d, conf = self.grouped()
        elif self.m > 1:
            rows = None if scale is None else scale.repeat_interleave(self.m)
            x, d = (x.double(), d.double()) if self.cut() else (x, d)  # as their norm is
        return self.part._wc_form.sums(self.part, x, d, rows, conf, wide)

    def key(self) -> Any:
        """What the use shares with other uses: the parameter, or the block of it."""
        part = self.part
        return (id(part.parameter), part.rows) if isinstance(part, Part) else (id(part.weight), None)


def _together(norms: Sequence[tuple[Tensor, float]]) -> Tensor:
    """B_i: the root of sum_k (||g_k||/t_k)^2 of each record, from the norms and thresholds of layers."""
    if len({(norm.dtype, t) for norm, t in norms}) == 1:  # the usual case: one operator for all layers, the same bits
        return (torch.stack([norm for norm, _ in norms]) / norms[0][1]).square().sum(0).sqrt()
    return torch.stack([(norm / t).square() for norm, t in norms]).sum(0).sqrt()


class Collector:
    """Takes both factors of each product, limits every record and adds the sums to the release.

    Args:
        add: Receives (place in the release, sum over records).
        caps: How convolutions under the joint cap measure their gradients.
        drop: Called before a foreign backward pass is refused: what was collected so far must not be released.
        done: Told the places of a layer's parameters as soon as the pass adds nothing more to them; None: nobody asks.

    Formal guarantees:
        While a collection is open, the sums handed to ``add`` hold for every record and every layer with a limit c_k of
        its own at most c_k in norm, over all uses of the layer together (weight and beta times bias), and for all
        layers under the joint cap together sum_k ||g_k||^2/t_k^2 <= 1; up to float32 rounding of norms, for which the
        sensitivities allow. A record with a non-finite factor contributes exact zeros. One collection is one backward
        pass over one physical batch whose records are its rows: anything else is refused or adds nothing. Whether a
        record was scaled is private and told to nobody.
    """

    def __init__(
        self, add: Callable[[int, Tensor], None], caps: int = CHEAPEST, drop: Callable[[], None] = lambda: None,
        done: Callable[[Collection[int]], None] | None = None,
    ) -> None:  # fmt: skip
        self.add, self.caps, self.drop, self.done, self.entries = add, caps, drop, done, list[Entry]()
        self.anchor: Tensor | None = None  # a leaf on the layers' device: every product of a pass leads to it
        self.rows: int | None = None  # of the open collection
        self.probe: Callable[[Entry, Tensor, Tensor], None] | None = None  # looks at factors, for tests on public data
        self.passes = Passes()
        self._waiting: list[Use] = []
        self._mask: Tensor | None = None  # which rows are records; None: all

    def enter(self, entry: Entry) -> Sink:
        """A way for the products of one more layer."""
        self.entries.append(entry)
        if self.anchor is None:
            self.anchor = torch.zeros((), device=entry.layer._wc_token.device, requires_grad=True)
            wake_backward_thread(self.anchor.device)
        for layer in (entry.layer, *entry.tied):
            layer._wc_sink = Sink(layer, self.anchor, functools.partial(self.take, entry), self.passes)
            layer._wc_sink.attach = functools.partial(self._attach, entry)
        return entry.layer._wc_sink

    def _attach(self, entry: Entry, part: Any) -> Sink:
        take = functools.partial(self.take, entry, part=part)
        assert self.anchor is not None
        return Sink(part.layer, self.anchor, take, self.passes)

    def discover(self, run: Callable[[int], Any], signature: Hashable = None) -> RowTable:
        """Find which rows are whose, by ``run(n)``: a forward pass over n public records (:meth:`Passes.discover`)."""
        return self.passes.discover(run, signature)

    @contextlib.contextmanager
    def collection(self, rows: int, mask: Tensor | None = None) -> Iterator[None]:
        """One backward pass over a physical batch of ``rows`` records (or views of records).

        Rows whose ``mask`` is False are padding and contribute nothing, whatever a backward pass brings to them.
        """
        self._reset()
        self.rows, self._mask = rows, mask
        self.passes.running = self.passes.table is not None  # activations may be computed again
        try:
            yield
            if self._waiting:
                self._finish()
        finally:
            self.rows = self._mask = None
            self.passes.running = False
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
        try:
            found = gradients_at(leaves, outputs, given)
        except RuntimeError as error:
            if "use_reentrant=True" not in str(error):
                raise
            raise ContractError(
                "the model uses reentrant checkpointing, whose backward pass the engine cannot follow: call "
                "checkpoint(..., use_reentrant=False) (transformers: gradient_checkpointing_kwargs)."
            ) from error
        return [i for i, g in zip(wanted, found[:-1], strict=True) if g is not None]

    def _reset(self) -> None:
        self._waiting = []
        for entry in self.entries:
            entry.taken, entry.spent = 0, None

    def take(
        self, entry: Entry, x: Tensor, d: Tensor, borrowed: bool = False, conf: Sequence[int] = (), part: Any = None
    ) -> None:
        """The factors of one use, without gradients; ``borrowed`` ones must not be kept. Outside a collection refused.

        ``part``: whose product it is, where that is not the layer as a whole.
        """
        if self.rows is None:
            self.drop()
            raise ContractError(
                "backward() went through a private layer outside the private loss (a penalty on activations, another "
                "loss): only the criterion that make_private returned may train the model. Remove that term."
            )
        use = self._use(entry, entry.layer if part is None else part, x, d, conf)
        if self.probe is not None or entry.waits():  # kept, without the graph behind them
            use.x, use.d = use.x.detach(), use.d.detach()
        if self.probe is not None:
            self.probe(entry, *use.grouped()[:2])
            return
        entry.taken += 1
        with no_autocast(d.device.type):
            if self._mask is not None and entry.layer._wc_counter is not None:  # padding has no say in quantiles either
                rows = self._mask.repeat_interleave(use.m).view(-1, *(1,) * (use.d.dim() - 1))
                use.d = torch.where(rows, use.d, torch.zeros_like(use.d))
            if entry.waits():
                if borrowed:
                    use.x, use.d = use.x.clone(), use.d.clone()
                self._waiting.append(use)
            elif entry.taken <= max(1, entry.uses):
                if use.part._wc_product.dtype == torch.float32 and entry.capped():
                    use.own = use.part._wc_form.own(use.part, *use.grouped(), use.part._wc_kind)
                if use.own is None:
                    self._add(use, self._masked(self._scale(entry, use), d))
                    if self.done is not None and entry.taken == max(1, entry.uses):
                        self.done(entry.places())
                else:
                    self._add_all([use], use.own.norm(beta_of(use.part)) / entry.layer._wc_limits[2])

    def _use(self, entry: Entry, part: Any, x: Tensor, d: Tensor, conf: Sequence[int]) -> Use:
        """One use, records in front; refuses rows that belong to no record (SOUNDNESS section 7, condition b)."""
        assert self.rows is not None
        kind, table, layout = part._wc_form, self.passes.table, RECORDS
        if table is not None and kind is not COPIED:
            layout = table.find(part, x.shape, self.rows)
            if layout is not None and layout.m == 0:  # folded by factors._layers
                layout = Layout(0, x.shape[0] // max(1, self.rows))
        whole = layout is not None and x.shape[layout.dim] == self.rows * layout.m == d.shape[layout.dim]
        if layout is None or not whole or (layout.dim and kind in (CONV, CHANNELS)):
            layer = getattr(part, "layer", part)
            raise ContractError(
                f"a {type(layer)._wc_native.__name__} layer ran on {x.shape[0]} rows in a batch of {self.rows} "
                "records: rows of a product must be records. Keep records on dimension 0 (positions behind it)."
            )
        if layout.dim:
            x, d = x.movedim(layout.dim, 0), d.movedim(layout.dim, 0)
        return Use(entry, part, x, d, tuple(conf), layout.m)

    def _masked(self, scale: Tensor | None, d: Tensor) -> Tensor | None:
        if self._mask is None:
            return scale
        keep = self._mask.to(d.device)
        return keep.float() if scale is None else torch.where(keep, scale, torch.zeros_like(scale))

    def _scale(self, entry: Entry, use: Use) -> Tensor | None:
        """Scale of each record, so that all uses of the layer together keep its limit."""
        part, (x, d, conf) = use.part, use.grouped()
        if entry.uses == 1 and entry.measure is None:
            return part._wc_form.scale(part, x, d, part._wc_counter, conf)
        limits, flags = part._wc_limits, part._wc_flags
        both: tuple[Tensor, Tensor] = part._wc_form.factors(part, x, d, conf)
        scale = record_scale(*both, limits, flags & ~CAP, part._wc_counter)
        if flags & BOUND:
            free = entry.measure is None
            norm = both[0] * both[1] if free else part._wc_form.certified(part, x, d, both, entry.measure, conf)
        else:
            norm = part._wc_form.norm(part, x, d, part._wc_kind, conf)
        left = limits[2] if entry.spent is None else (limits[2] - entry.spent).clamp(min=0)
        scale = cap_scale(scale, norm, *both, left, part._wc_counter)
        used = torch.where(scale > 0, scale * norm, 0.0)
        entry.spent = used if entry.spent is None else entry.spent + used
        return scale

    @torch.no_grad()
    def _finish(self) -> None:
        """Limits over several uses: B_i over all layers under the joint cap, and each layer's own."""
        waiting, self._waiting = self._waiting, []
        entries: dict[int, list[Use]] = {}
        for use in waiting:
            entries.setdefault(id(use.entry), []).append(use)
        with no_autocast(waiting[0].d.device.type):
            joint: list[tuple[Tensor, float]] = []
            for uses in entries.values():
                entry = uses[0].entry
                way = self.caps if entry.joint is not None else entry.layer._wc_kind
                total = uses[0].norm(way) if len(uses) == 1 else norm_over(uses, way)
                if entry.joint is not None:
                    joint.append((total, entry.joint))
                else:
                    self._add_all(uses, total / entry.layer._wc_limits[2])
            if joint:
                shared = [use for use in waiting if use.entry.joint is not None]
                self._add_all(shared, _together(joint))

    def _add_all(self, uses: Sequence[Use], total: Tensor) -> None:
        """Uses with one limit, of which each record's norm takes ``total``."""
        scale = self._masked(within_one(total), total)
        last = {id(use.entry): use for use in uses}  # limits over several uses are taken when all are known
        counts = Counter(keys := [(id(use.entry), use.key()) for use in uses])
        together: dict[int, dict[int, Tensor]] = {}  # uses of one layer may cancel: only their sum is limited
        for use, key in zip(uses, keys, strict=True):
            if counts[key] == 1:
                self._add(use, scale)
            else:
                found = together.setdefault(id(use.entry), {})
                for place, total in self._totals(use, scale, True):
                    found[place] = found[place] + total if place in found else total.double()
            if last[id(use.entry)] is use:
                for place, total in together.pop(id(use.entry), {}).items():
                    self.add(place, total)
                if self.done is not None:
                    self.done(use.entry.places())

    def _add(self, use: Use, scale: Tensor | None) -> None:
        for place, total in self._totals(use, scale, False):
            self.add(place, total)

    def _totals(self, use: Use, scale: Tensor | None, wide: bool) -> Iterator[tuple[int, Tensor]]:
        """Places in the release, and what one use adds there."""
        entry, part = use.entry, use.part
        layer, names = (part.layer, (part.name, part.bias_name)) if isinstance(part, Part) else (part, _NAMES)
        for name, total in zip(names, use.scaled(scale, wide), strict=True):
            if name is None or total is None:
                continue
            place = entry.place(layer, name)
            if place is not None:
                yield place, part.laid(total, name) if isinstance(part, Part) else total
