"""One step's release: sums of per-record gradients come in, (G + noise)/b goes out, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._device import constant
from weightclip._torch import ConvNd, add_all_, multiply_all_, norms_of_all, split_like, version_of
from weightclip.certificate import Evaluation, LayerUse, OpenPlan, Plan
from weightclip.errors import WeightclipError
from weightclip.factors import Product, tile_additions, tile_rounding, trained
from weightclip.factors.kernels import fits, scale_blocks_
from weightclip.noise._knorm import KNorm, fill_, spread
from weightclip.noise._mechanisms import Allocation, floored, floored_at, joint_multiplier, round_release_
from weightclip.noise._streams import NOISE, Streams

_U = 2.0**-24
_BITS = 36  # of a sensitivity, below its power of two
_MOST = 2**24  # records (times views) in a draw, so that no sum of theirs leaves 62 bits
_UP = 1.0 + 2.0**-22  # keeps a scale above its float64 value after it is rounded to float32


class GridSums:
    """Adds up the sums of physical batches in int64, in units of about 2^-36 of each layer's sensitivity.

    Args:
        records: Largest number of records of a draw, times views.
        pieces: Physical batches of a draw, on all processes together.

    Formal guarantees:
        Let S_j and S_j' be the sums of the j-th physical batch with and without one record (which may move other
        records from batch to batch), so that sum_j S_j and sum_j S_j' differ by at most Delta_k in norm. T takes every
        entry to a multiple of the unit u, towards zero: T(S_j) = S_j - e_j with entries of e_j below u in size; u is a
        power of two, so that nothing else rounds. Integers add exactly, hence sum_j T(S_j) and sum_j T(S_j') differ by
        at most Delta_k + 2 pieces u sqrt(d_k). A bias, whose noise is scaled for beta times its gradient, has a unit of
        its own, at most u/beta. With u <= 2^-36 Delta_k all layers together, under one limit or many, need the factor
        1 + 2^-35 pieces sqrt(sum_k d_k) of :meth:`slack` (SOUNDNESS Theorem 21, rounding before the noise). Units are
        functions of sensitivities, which are public.
    """

    def __init__(self, records: int, pieces: int) -> None:
        if records > _MOST:
            raise WeightclipError(
                f"exact_sums takes draws of at most {_MOST} records (times views), this run allows {records}: leave it "
                "out, or make the draws smaller."
            )
        self.pieces = pieces
        self.units: list[float] = []
        self.totals: list[Tensor | None] = []

    def slack(self, dimension: int) -> float:
        """The factor by which the grid enlarges sensitivities, for so many trained numbers."""
        return 1 + 2.0 ** (1 - _BITS) * self.pieces * math.sqrt(dimension)

    def begin(self, sensitivities: Sequence[float]) -> None:
        """A new draw, in which one record's gradient of each parameter has a norm of at most these."""
        self.units = [2.0 ** (math.floor(math.log2(value)) - _BITS) for value in sensitivities]
        self.clear()

    def add(self, sums: Sequence[Tensor | None]) -> None:
        """The sums of one physical batch."""
        for i, value in enumerate(sums):
            if value is not None:
                whole = self.whole(i, value)
                before = self.totals[i]
                self.totals[i] = whole if before is None else before + whole

    def whole(self, i: int, value: Tensor) -> Tensor:
        """The sum of a physical batch for the i-th parameter in its units."""
        return (value.double() / self.units[i]).trunc_().to(torch.int64)

    def values(self) -> list[Tensor | None]:
        """The totals as numbers."""
        return [None if t is None else t.double().mul_(u) for t, u in zip(self.totals, self.units, strict=True)]

    def clear(self) -> None:
        """Forget a draw."""
        self.totals = [None] * len(self.units)


@dataclass(frozen=True)
class Block:
    """One trainable parameter: where it lies in the flat sum, and its layer."""

    parameter: nn.Parameter
    layer: int
    beta: float  # native gradient times beta carries the layer's noise
    pull_back: Callable[[Tensor], Tensor] | None = None  # from the effective weight to the parameter, after the noise


class Release:
    """Holds the sums of one step and turns them into the released gradient.

    Formal guarantees:
        With sensitivities Delta_k (rounding slack included) and scales s_k from the allocation,
        sum_k Delta_k^2/s_k^2 = 1/sigma^2: all layers jointly are one Gaussian mechanism of multiplier sigma under
        adding or removing one record. The divisor is the public expected batch size. With M views of each record
        Delta_k bounds each *unscaled* view, so their sum moves by at most M Delta_k: noise M s_k, divisor M b
        (SOUNDNESS Theorem 18). With a K-norm mechanism Delta_k bounds entrywise norms, and one draw is 1/sigma-DP. A
        grid rounds what is released.
    """

    def __init__(
        self, plan: Plan | OpenPlan, allocation: Allocation, sigma: float, batch: float, slack: Sequence[float],
        in_pieces: bool = False, views: int = 1, grid: float | None = None, knorm: KNorm | None = None,
        exact: GridSums | None = None,
    ) -> None:  # fmt: skip
        self.views, self.grid, self.knorm, self.exact = views, grid, knorm, exact
        self.plan, self.allocation, self.sigma, self.batch, self.slack = plan, allocation, sigma, batch, list(slack)
        self.blocks: list[Block] = []
        self.dims: list[int] = []
        self.joint = [plan.bounds.of("joint_cap", path) for path in plan.layers]
        for k, path in enumerate(plan.layers):
            module = plan.model.get_submodule(path)
            named = trained(plan.holders(path))
            self.dims.append(sum(p.numel() for _, p in named))
            for name, parameter in named:
                beta = (plan.bounds.of("bias_scale", path) or 1.0) if name == "bias" else 1.0
                back = getattr(module, "pull_back", None) if name == "weight" else None
                self.blocks.append(Block(parameter, k, beta, back))
        self.parameters = [b.parameter for b in self.blocks]
        self.leaves: list[Tensor] = list(self.parameters)  # what autograd would meet
        wide = any(b.parameter.dtype == torch.float64 for b in self.blocks)
        self.sizes = [b.parameter.numel() for b in self.blocks]
        self.device = self.blocks[0].parameter.device
        self.ends = torch.tensor(self.sizes).cumsum(0).to(self.device)
        # pieces of a draw are added in float64: hundreds of float32 additions would cost slack (SOUNDNESS section 6)
        self.sum_dtype = torch.float64 if wide or in_pieces else torch.float32
        self.noise_dtype = torch.float64 if wide else torch.float32
        self.sums: list[Tensor | None] = [None] * len(self.blocks)
        self.share: Callable[[Tensor], None] = lambda released: None  # hands what is released to other processes
        self.order = b""  # of the reductions, where sums are reduced one by one
        self._kept: tuple[Tensor, tuple[float, int, int], list[float]] | None = None

    def split(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of what lies in one piece."""
        return split_like(flat, self.parameters)

    def finite(self) -> Tensor | bool:
        """Whether all weights are finite, and none is far too large; on a device nothing waits for the answer."""
        with torch.no_grad():
            norms = norms_of_all(self.parameters)
        if norms[0].is_cpu:
            return all(map(math.isfinite, norms))
        return torch.isfinite(torch.stack(norms)).all()

    def clear(self) -> None:
        """Forget the sum of an abandoned or released step."""
        self.sums = [None] * len(self.blocks)
        if self.exact is not None:
            self.exact.clear()

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a gradient to the sum; the tensor is kept, and never written to."""
        before = self.sums[index]
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.dtype != self.sum_dtype:
            gradient = gradient.to(self.sum_dtype)
        self.sums[index] = gradient if before is None else before + gradient

    def begin(self, sensitivities: Tensor) -> None:
        """A new draw, limited to these sensitivities."""
        if self.exact is not None:
            values = sensitivities.tolist()
            self.exact.begin([values[b.layer] / b.beta for b in self.blocks])

    def end_batch(self) -> None:
        """The sums of a physical batch are complete: on a grid they join those of the others as integers."""
        if self.exact is not None:
            with torch.no_grad():
                self.exact.add(self.sums)
            self.sums = [None] * len(self.blocks)

    def weights(self) -> Iterable[Tensor]:
        """The parameters' values."""
        return self.parameters

    def collected(self) -> list[Tensor | None]:
        """The sums so far: of type int64 on a grid."""
        return self.sums if self.exact is None else self.exact.totals

    @torch.no_grad()
    def exchange(self, add_up: Callable[[Tensor], None]) -> None:
        """Put the sum over several processes in the place of this one's; ``add_up`` adds in place."""
        kind = torch.int64 if self.exact is not None else torch.float64
        flat = torch.zeros(sum(self.sizes), dtype=kind, device=self.device)
        views = self.split(flat)
        for view, total in zip(views, self.collected(), strict=True):
            if total is not None:
                view.copy_(total)
        add_up(flat)
        if self.exact is None:
            self.sums = list(views)
        else:
            self.exact.totals = list(views)

    def sensitivities(self, evaluations: dict[str, Evaluation]) -> Tensor:
        """Delta_k of every layer, slack and floor included: float64, on the CPU where all are plain numbers."""
        values = [e.sensitivity for e in evaluations.values()]
        device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
        if device.type == "cpu":  # as `enlarged`, in plain numbers
            bounds = [float(v) * s for v, s in zip(values, self.slack, strict=True)]
            floor = floored_at(bounds)
            return torch.tensor([max(v, floor) for v in bounds], dtype=torch.float64)  # NaN stays
        # a number becomes a tensor by a kernel, not by a copy from the host, which would wait
        parts = [
            v.double() if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float64, device=device)
            for v in values
        ]
        return self.enlarged(torch.stack(parts))

    def enlarged(self, bounds: Tensor) -> Tensor:
        """Certified bounds with the rounding slack of the sum, and the floor that a layer with Delta_k = 0 gets."""
        return floored(bounds * constant(tuple(self.slack), bounds.device))

    def _grouped(self, sensitivities: Tensor) -> tuple[Tensor, list[int], Tensor | None, list[int]]:
        """Sensitivities of groups that are bounded on their own; layers under the joint cap are one group.

        With g/t of norm at most 1 over all capped layers together, s_k = s_J t_k. Returns (sensitivities, dimensions,
        t_k or None without a cap, the layers that stand alone).
        """
        capped = [k for k, t in enumerate(self.joint) if t is not None]
        alone = [k for k, t in enumerate(self.joint) if t is None]
        if not capped:
            return sensitivities, self.dims, None, alone
        thresholds = constant(tuple(t or 1.0 for t in self.joint), sensitivities.device)
        ratio = (sensitivities / thresholds)[capped].max()  # 1 and the rounding slack
        dims = [sum(self.dims[k] for k in capped), *(self.dims[k] for k in alone)]
        return torch.cat([ratio.reshape(1), sensitivities[alone]]), dims, thresholds, alone

    def scales(self, sensitivities: Tensor) -> Tensor:
        """s_k of every layer (root mean square of the noise on one entry)."""
        if self.knorm is not None:
            return spread(self.knorm, self.dims, 1 / self.sigma, sensitivities) if self.sigma > 0 else 0 * sensitivities
        grouped, dims, thresholds, alone = self._grouped(sensitivities)
        parts = self.allocation.scales(grouped, dims, self.sigma)
        if thresholds is None:
            return parts
        scales = parts[0] * thresholds
        scales[alone] = parts[1:]
        return scales

    def multiplier(self, sensitivities: Tensor) -> float:
        """The joint multiplier of a step: (sum over groups of (Delta/s)^2)^(-1/2)."""
        grouped, dims, _, _ = self._grouped(sensitivities)
        return float(joint_multiplier(grouped, self.allocation.scales(grouped, dims, self.sigma)))

    def factors(self, sensitivities: Tensor) -> Tensor:
        """What multiplies a standard normal of each parameter: views s_k, divided by beta on a bias."""
        betas = constant(tuple(b.beta for b in self.blocks), sensitivities.device)
        layers = constant(tuple(b.layer for b in self.blocks), sensitivities.device).long()
        return self.scales(sensitivities)[layers] * (_UP * self.views) / betas

    def _multiples(self, sensitivities: Tensor) -> list[float]:
        """The same in plain numbers; those of constant sensitivities are kept."""
        settings = self.sigma, self.views, version_of(sensitivities)  # nobody may have written into them since
        if self._kept is None or self._kept[0] is not sensitivities or self._kept[1] != settings:
            scales = self.scales(sensitivities).tolist()
            found = [scales[b.layer] * (_UP * self.views) / b.beta for b in self.blocks]
            self._kept = sensitivities, settings, found
        return self._kept[2]

    @torch.no_grad()
    def release(
        self, sensitivities: Tensor, streams: Streams, step: int, factors: Tensor | None = None,
        noise: tuple[Tensor, list[Tensor]] | None = None,
    ) -> Tensor:  # fmt: skip
        """Set every ``parameter.grad`` to (G + s_k N(0, I))/b; parameters without a gradient get pure noise.

        The gradients are new tensors: one that is kept by the caller never shows a later sum. ``factors`` are those of
        :meth:`factors` for the same sensitivities, ``noise`` that of :meth:`noise` for the same arguments, if they are
        at hand. Returns the gradients in one piece (before a pull-back).
        """
        sums = self.sums if self.exact is None else self.exact.values()
        self.clear()  # first of all: whatever interrupts this release, no later one holds these records again
        released, views = self.noise(sensitivities, streams, step, factors) if noise is None else noise
        filled: list[Tensor] = []
        totals: list[Tensor] = []
        for view, total in zip(views, sums, strict=True):
            if total is not None:
                filled.append(view)
                totals.append(total)
        if totals:
            add_all_(filled, totals)
        released.div_(self.batch * self.views)
        if self.grid is not None:
            round_release_(released, self.grid)
        self.share(released)
        self._hand_out(views)
        return released

    @torch.no_grad()
    def receive(self) -> None:
        """The same on a process that adds no noise: the gradients are those that another one releases."""
        self.clear()
        released, views = self._room()
        self.share(released)
        self._hand_out(views)

    def _room(self) -> tuple[Tensor, list[Tensor]]:
        flat = torch.empty(sum(self.sizes), dtype=self.noise_dtype, device=self.device)
        return flat, self.split(flat)

    def _hand_out(self, views: Sequence[Tensor]) -> None:
        """Set every ``parameter.grad`` to its part of what is released."""
        for view, block in zip(views, self.blocks, strict=True):
            gradient, parameter = view if block.pull_back is None else block.pull_back(view), block.parameter
            parameter.grad = gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)

    @torch.no_grad()
    def noise(
        self, sensitivities: Tensor, streams: Streams, step: int, factors: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The noise of one step's sum: all parameters in one piece, and each one's part of it; zeros without noise."""
        noise, views = self._room()
        if self.sigma > 0:
            self._draw(noise, views, sensitivities, streams, step, factors)
        else:
            noise.zero_()
        return noise, views

    def _draw(
        self, noise: Tensor, views: list[Tensor], sensitivities: Tensor, streams: Streams, step: int,
        factors: Tensor | None,
    ) -> None:  # fmt: skip
        """Fill the noise of the sum over records and views; that on a bias is divided by its beta."""
        if self.knorm is not None:
            fill_(noise, self.dims, self.knorm, 1 / self.sigma, sensitivities, streams, step)
            multiples: Any = [_UP * self.views / b.beta for b in self.blocks]
        else:
            streams.normal_(noise, NOISE, step)
            if sensitivities.is_cpu:
                multiples = self._multiples(sensitivities)
                if noise.is_cpu and max(multiples) < 1e30:  # the same numbers; NumPy warns of infinite ones
                    array, start = noise.numpy(), 0
                    if len(set(multiples)) == 1:  # as under one joint cap
                        array *= multiples[0]
                        return
                    for size, multiple in zip(self.sizes, multiples, strict=True):
                        array[start : start + size] *= multiple
                        start += size
                    return
            else:  # the factors stay on the device: nothing waits
                factors = self.factors(sensitivities) if factors is None else factors
                if fits(noise):
                    scale_blocks_(noise, factors, self.ends)
                    return
                multiples = list(factors.to(noise.dtype).unbind())
        multiply_all_(views, multiples)


def sum_slack(
    plan: Plan | OpenPlan, products: Mapping[str, Product], b_max: int, physical: int | None, views: int = 1
) -> list[float]:
    """Per layer, the factor by which rounding of products and sums over records can enlarge Delta (SOUNDNESS 6).

    A float32 rounding of the sum over records counts 2 2^-24 b_max. With float64 products these are one for each use of
    the layer (the product is stored in the parameter's type) and the addition of uses; pieces of a draw are added in
    float64, and two stand for the float64 sums. Float32 products of several records add every addend inside a chunk.
    Products of one record each round that record alone, whoever else is in the batch: (summands + 8) 2^-22 of its own
    (tensor cores truncate). Where such products are added in float32 groups, those additions are counted.
    Views of a record are summed like records, and M Delta_k bounds them together.
    """
    slack = []
    for path in plan.layers:
        product, uses = products[path], plan.uses(path)
        n, own = 2.0 * len(uses) + 2, 1.0
        if product.dtype != torch.float64 and product.covered:
            summands = max(_positions(plan.model.get_submodule(path), use) for use in uses)
            if product.chunk == 1:
                own = 1 + tile_rounding(summands)
                n += tile_additions(product.group)
            else:
                n += summands * (product.chunk or (physical or b_max) * views) + 1
        slack.append(own * (1 + 2 * n * _U * b_max))
    return slack


def _positions(module: nn.Module, use: LayerUse) -> int:
    """Summands one record contributes to one entry of the weight gradient."""
    if isinstance(module, ConvNd):
        return max(math.prod(s[1:]) for s in (use.outside, use.inside))  # behind the channels: its rows too
    return max(1, math.prod(use.outside[:-1]))
