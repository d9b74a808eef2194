"""The release of a model whose parameters are dealt out by rows: every owner releases its rows, with their noise."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weightclip._torch import norms_of_all
from weightclip.errors import WeightclipError
from weightclip.noise._mechanisms import round_release_
from weightclip.noise._release import Release
from weightclip.noise._streams import NOISE, Streams

if TYPE_CHECKING:
    from weightclip.distributed import Rows


class ShardedRelease(Release):
    """As :class:`Release`, for parameters of which every process owns some rows.

    A parameter's sum over a physical batch is reduced to the owners as soon as it is complete, and freed: no process
    ever holds the sums of the whole model. After the charge every owner adds the noise of its rows.

    Attributes:
        owned: This process's rows of each parameter.
        leaves: The whole parameters, which autograd would meet.

    Formal guarantees:
        Those of :class:`Release`. Noise is made after the reduction, from the one stream that belongs to the release:
        the entry at place j of all parameters in a row has the j-th number of it, whoever owns it, so that no two
        entries share noise and the release does not depend on how rows are dealt out (SOUNDNESS Theorem 32). Sums are
        reduced in float64, or as integers; a sum that is kept in float32 was rounded no more often than Theorem 21
        allows for (a product and an addition for each use).
    """

    def __init__(
        self, *args: Any, owned: Callable[[Sequence[Any]], Sequence[Rows]], everywhere: Callable[[bool], bool],
        **named: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **named)
        self._everywhere = everywhere  # whether something holds on all processes
        if self.knorm is not None:
            raise WeightclipError("the K-norm mechanism draws one radius for all layers: not under fully_shard.")
        if any(block.pull_back is not None for block in self.blocks):
            raise WeightclipError("standardised convolutions need whole gradients: not under fully_shard.")
        self.owned = list(owned(self.parameters))
        self._parts: list[Tensor | None] = [None] * len(self.blocks)  # reduced, this process's rows
        self._done: set[int] = set()  # of the present physical batch

    def finite(self) -> bool:
        """Whether all rows, of all owners, are finite, and none is far too large; all processes ask together."""
        norms = norms_of_all([rows.mine() for rows in self.owned])
        return self._everywhere(all(bool(torch.isfinite(norm)) for norm in norms))

    def clear(self) -> None:
        super().clear()
        self._parts, self._done = [None] * len(self.blocks), set()
        self.order = b""

    @torch.no_grad()
    def settled(self, places: Iterable[int]) -> None:
        """The physical batch adds nothing more to these parameters: their sums go to the owners."""
        for i in sorted(places):
            total, self.sums[i] = self.sums[i], None
            self._done.add(i)
            self.order = hashlib.blake2b(self.order + i.to_bytes(4, "little"), digest_size=16).digest()
            if self.exact is not None:
                part = self.owned[i].sum_to_owner(total, torch.int64, functools.partial(self.exact.whole, i))
            else:
                part = self.owned[i].sum_to_owner(total, torch.float64, Tensor.double).to(self.sum_dtype)
            before = self._parts[i]
            self._parts[i] = part if before is None else before.add_(part)

    def end_batch(self) -> None:
        """The sums of a physical batch are complete: those that nothing was added to are reduced, too."""
        self.settled(set(range(len(self.blocks))) - self._done)
        self._done = set()

    def exchange(self, add_up: Callable[[Tensor], None]) -> None:
        """Nothing: sums are with their owners."""

    def weights(self) -> Iterator[Tensor]:
        """Every parameter as a whole, one after the other; all processes ask together."""
        for rows in self.owned:
            yield rows.whole(rows.mine())

    def collected(self) -> Iterator[Tensor | None]:  # type: ignore[override]
        """The sums so far, each as a whole, one after the other; all processes ask together."""
        for rows, part in zip(self.owned, self._parts, strict=True):
            yield None if part is None else rows.whole(part)

    @torch.no_grad()
    def release(  # type: ignore[override]
        self, sensitivities: Tensor, streams: Streams, step: int, factors: Tensor | None = None
    ) -> None:
        """Set the gradient of every parameter to this process's rows of (G + s_k N(0, I))/b, one after the other."""
        parts, units = self._parts, [] if self.exact is None else list(self.exact.units)
        self.clear()  # first of all: whatever interrupts this release, no later one holds these records again
        multiples = self._multiples(sensitivities.cpu())
        numbers, place = streams.numbers(self.noise_dtype, NOISE, step), 0
        for i, (rows, block) in enumerate(zip(self.owned, self.blocks, strict=True)):
            part, parts[i] = parts[i], None  # freed with its turn
            out = torch.zeros(rows.size, dtype=self.noise_dtype)
            if self.sigma > 0:
                numbers.read_(out, place + rows.start).mul_(multiples[i])
            out = out.to(self.device)
            if part is not None:
                out += part.flatten() if self.exact is None else part.flatten().double().mul_(units[i])
            out.div_(self.batch * self.views)
            if self.grid is not None:
                round_release_(out, self.grid)
            block.parameter.grad = rows.gradient(out)
            place += self.sizes[i]

    def receive(self) -> None:
        """Every owner makes its own release."""
        raise AssertionError("rows are released by their owners")
