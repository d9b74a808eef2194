"""Per-record scaling of the two factors of a weight gradient (SOUNDNESS section 4).

The gradient of one record is delta (x) (x, beta): bounding both factors bounds it, and scaling delta by one number per
record inside the product is all it takes. The scale never reaches the gradient that flows on to earlier layers.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weightclip._torch import ConvNd, apply_directly, reshaped_copy_of, transforms_active, version_of
from weightclip.errors import WeightclipError

RADIUS, COTANGENT, CAP = 1, 2, 4  # bits: which of the limits are enforced
KIND_SHIFT = 4  # three bits from here on say how a capped convolution measures its gradients (factors._record_norms)
BOUND = 1 << 7  # the cap stands for a certified bound: it meets the free product of norms, as the certificate does
SMALLEST = 2.0**-126  # normal float32: smaller scales count as zero
_TINIEST = torch.finfo(torch.float32).tiny
# Positions or uses of a record that cancel to less than this part of their own norms count as so much: they are added
# up over records in float64, and no such sum may be so much larger than what is limited that its rounding shows.
CANCELLED = 2.0**-12
_IMPLIED = 1 + 2.0**-20  # both radii with the rounding of norms' scales, far more than the five there are
TINY = 1e-30  # floor under a norm before dividing by it: a zero record keeps scale one


@dataclass(frozen=True)
class Product:
    """How weight-gradient products are formed and summed over records (SOUNDNESS section 6).

    Attributes:
        dtype: Type of products and sums. float64 makes the rounding of the sum negligible. None chooses per layer: one
            float32 product per record, summed in float64, for convolutions and on CUDA for dense layers too (on tensor
            cores where the pass itself is in 16 bits or TF32, otherwise in float64 all the same), so that a record's
            rounding is its own and moves nobody else's; float64 for everything else.
        chunk: Records per product; partial sums are added in float64. 0: one product for the whole batch. float32
            products of more than one record add 2 n 2^-24 b_max to the sensitivity, n their summands. On CUDA, where
            libraries may cut their operands to TF32 and no sensitivity would cover that, they are what None chooses.
        group: Rows whose products, each formed by itself on tensor cores, are added in float32 before they join the
            sum (dense layers on CUDA; convolutions gain nothing); chosen for the largest draw, and counted in the
            sensitivity. 0: all are added in float64.
        covered: False leaves the rounding of float32 sums out of the sensitivities and says so in the report: the
            speed of ordinary training, at the price of a guarantee that holds for exact sums only.
    """

    dtype: torch.dtype | None = None
    chunk: int = 0
    covered: bool = True
    group: int = field(default=0, repr=False)  # settled by the engine: no part of what a seeded run is named by

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.float32, torch.float64) or min(self.chunk, self.group) < 0:
            raise WeightclipError(
                "Product: dtype is None, torch.float32 or torch.float64, and chunk is not negative (products in other "
                f"types round by more than is allowed for); got {self!r}."
            )

    @classmethod
    def fast(cls) -> Product:
        """Ordinary float32 products, rounding not covered."""
        return cls(torch.float32, 0, covered=False)

    def resolve(self, layer: nn.Module, device: torch.device, group: int = 0) -> Product:
        """The choice for one layer; ``group`` is that of the largest draw."""
        library = self.dtype == torch.float32 and self.chunk != 1 and device.type == "cuda"
        if self.dtype is not None and not (library and self.covered):
            return self
        if device.type == "cuda" and isinstance(layer, nn.Linear):
            return Product(torch.float32, 1, group=group)
        return Product(torch.float32, 1) if isinstance(layer, ConvNd) else Product(torch.float64, 0)


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
        self._radii = [x * r for x, r, _ in self.table.tolist()]
        self._mask = torch.tensor(list(moving), device=self.table.device)
        self._shares = torch.tensor(self.shares, dtype=torch.float64, device=self.table.device)
        self._rows: list[Any] = list(self.table.unbind())
        for layer, row in zip(layers, self._rows, strict=True):
            layer.__dict__["_wc_limits"] = row

    def set(self, sensitivities: Tensor, constant: bool = False) -> None:
        """Limits of the release with these sensitivities; nothing waits for a device.

        ``constant``: the very same numbers as whenever this tensor comes, so that once is enough.
        """
        if self.moving and sensitivities is not self._constant:  # bounds that no weight enters stay what they are
            self._set(sensitivities, constant)

    @torch.no_grad()
    def _set(self, sensitivities: Tensor, constant: bool) -> None:
        if sensitivities.is_cpu:
            caps = [value * share for value, share in zip(sensitivities.tolist(), self.shares, strict=True)]
            for i, place in zip(self.moving, self._places, strict=True):
                place.fill_(caps[i])
            for i in self.moving:  # a cap that both radii keep by themselves, however their product is rounded
                row = self._rows[i]
                row._wc_implied = (id(row), version_of(row)) if caps[i] >= self._radii[i] * _IMPLIED else None
            self._constant = sensitivities if constant else None
            return
        self._constant = None
        values = sensitivities * self._shares
        self.caps.copy_(values if len(self.moving) == len(self.shares) else torch.where(self._mask, values, self.caps))


class Counts(Protocol):
    """Where records within a limit are counted (private quantiles)."""

    def add(self, index: int, inside: Tensor, d_norm: Tensor) -> None:
        """``inside`` of each record for limit number ``index``; ``d_norm`` tells padding apart."""


def record_scale(
    x_norm: Tensor | None, d_norm: Tensor | None, limits: Tensor, flags: int, counter: Counts | None = None
) -> Tensor | None:
    """min(1, X/||x||) min(1, R/||delta||) min(1, cap/product), zero for non-finite records; (records,) or None.

    Args:
        x_norm: Norm of each record's input factor, beta row included.
        d_norm: Norm of each record's cotangent.
        limits: (3,) X_k, R_k, cap_k.
        flags: Which limits are enforced.
        counter: Told which records lie within each limit, if quantiles are followed.

    Formal guarantees:
        For every record, scale * x_norm * d_norm <= min(X, ...) * min(R, ...) and <= cap wherever those are enforced,
        whatever the record; a record with a non-finite factor gets 0.
    """
    if flags == 0 or x_norm is None or d_norm is None:
        return None
    scale = None
    # a norm of zero gives a scale of one without the floor as well; only derivatives need it
    floored = torch.is_grad_enabled()
    if flags & RADIUS:
        scale = (limits[0] / (x_norm.clamp(min=TINY) if floored else x_norm)).clamp(max=1)
        if counter is not None:
            counter.add(0, x_norm <= limits[0], d_norm)
    if flags & COTANGENT:
        second = (limits[1] / (d_norm.clamp(min=TINY) if floored else d_norm)).clamp(max=1)
        scale = second if scale is None else scale * second
        if counter is not None:
            counter.add(1, d_norm <= limits[1], d_norm)
    if flags & CAP and not (counter is None and flags & 3 == 3 and implied(limits)):
        product = x_norm * d_norm if scale is None else scale * x_norm * d_norm
        third = (limits[2] / product.clamp(min=TINY)).clamp(max=1)
        scale = third if scale is None else scale * third
        if counter is not None:
            counter.add(2, product <= limits[2], d_norm)
    scale = torch.ones_like(d_norm) if scale is None else scale
    # a norm that is not finite makes the scale 0 or NaN, if the scale depends on it
    both = flags & CAP or flags & (RADIUS | COTANGENT) == RADIUS | COTANGENT
    if all_normal(scale) and (both or (x_norm + d_norm).max().item() < math.inf):
        return scale  # the usual case: what follows would change nothing
    # a product that underflows or overflows float32 is not finite here either and counts as zero; so does a scale
    # below the normal numbers, whose rounding no allowance covers
    good = torch.isfinite(x_norm) & torch.isfinite(d_norm) & torch.isfinite(scale) & (scale >= SMALLEST)
    return torch.where(good, scale, torch.zeros_like(scale))


def all_normal(scale: Tensor) -> bool:
    """Whether every scale is a normal number; not asked on a device, where the answer would have to be waited for."""
    found = scale.is_cpu and not transforming() and scale.shape[0] > 0 and scale.min().item() >= SMALLEST  # none is NaN
    if found:
        scale._wc_positive = True  # type: ignore[attr-defined] # for those who would look once more
    return found


def implied(limits: Tensor) -> bool:
    """Whether both radii keep the cap: found above X R (1 + 8u), and this very row was not written since."""
    return not transforming() and getattr(limits, "_wc_implied", None) == (id(limits), version_of(limits))


def cap_scale(
    scale: Tensor | None, norm: Tensor, x_norm: Tensor, d_norm: Tensor, cap: Tensor, counter: Counts | None = None
) -> Tensor:
    """``scale`` lowered so that scale * norm <= cap, with ``norm`` a bound of each record's gradient norm."""
    before = torch.ones_like(norm) if scale is None else scale
    capped = before * (cap / (before * norm).clamp(min=TINY)).clamp(max=1)
    if counter is not None:
        counter.add(2, before * norm <= cap, d_norm)
    good = torch.isfinite(x_norm) & torch.isfinite(d_norm) & torch.isfinite(capped) & torch.isfinite(norm)
    good = good & (capped >= SMALLEST)  # as in record_scale
    return torch.where(good, capped, torch.zeros_like(capped))


def within_one(total: Tensor) -> Tensor:
    """min(1, 1/total) of each record; zero where ``total`` is not finite."""
    scale = total.clamp(min=TINY).reciprocal().clamp(max=1.0)
    if all_normal(scale):  # a norm that is not finite makes the scale 0 or NaN
        return scale
    good = torch.isfinite(total) & (scale >= SMALLEST)  # smaller scales round by more than is allowed for
    return torch.where(good, scale, torch.zeros_like(scale))


def masked(value: Tensor, scale: Tensor | None, times_scale: bool) -> Tensor:
    """``value`` with non-contributing records set to zero exactly (0 * nan would not be), and scaled if asked."""
    if scale is None:
        return value
    factor = scale.view((-1,) + (1,) * (value.dim() - 1))
    result = wide(value) * factor if times_scale else value
    if _all_count(scale):  # the usual case: no copy
        return result
    return torch.where(factor > 0, result, torch.zeros((), dtype=result.dtype, device=result.device))


def both_masked(x: Tensor, d: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(``masked(x, scale, False)``, ``masked(d, scale, True)``), with one look at the scales."""
    if _all_count(scale):
        return x, wide(d) * scale.view((-1,) + (1,) * (d.dim() - 1))
    return masked(x, scale, False), masked(d, scale, True)


def _all_count(scale: Tensor) -> bool:
    """Whether every record takes part; not asked on a device, where the answer would have to be waited for."""
    if not scale.is_cpu or transforming():
        return False
    return getattr(scale, "_wc_positive", False) or scale.shape[0] == 0 or scale.min().item() > 0


def _norm(value: Tensor) -> tuple[Tensor, float]:
    """Norm of each record, in float32 or better, and the sum that squares smaller than that type can hide."""
    # torch takes the norm in one pass, without storing squares; one number a record: a parameter without dimensions
    flat = value if value.dim() == 2 else value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)
    kind = None if flat.dtype in (torch.float32, torch.float64) else torch.float32
    return torch.linalg.vector_norm(flat, 2, 1, dtype=kind), flat.shape[1] * _TINIEST


def squared_norm(value: Tensor, more: float = 0.0) -> Tensor:
    """Sum of squares of each record and what is hidden of it, with ``more`` added."""
    norm, hidden = _norm(value)
    return norm.square() + (hidden + more) if torch.is_grad_enabled() else norm.square_().add_(hidden + more)


def record_norm(value: Tensor) -> Tensor:
    """Norm of each record, with room for what is hidden of it: sqrt(a^2 + h) <= a + sqrt(h)."""
    norm, hidden = _norm(value)
    return norm + math.sqrt(hidden)


def wide(value: Tensor) -> Tensor:
    """The tensor in float32 or better."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def as_multiplied(x: Tensor) -> Tensor:
    """An input in the type autocast multiplies it in: what is kept for the weight gradient, measured and limited is
    what the layer saw, at half the memory."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def own(value: Tensor) -> Tensor:
    """The tensor, no longer counted as a view: users may go on with in-place operators, as after the native layer."""
    return reshaped_copy_of(value) if value.dim() > 2 else value


def product_rounding(terms: int, product: torch.dtype, tiles: bool = False) -> float:
    """Share of ||x|| ||delta|| by which a record's product of ``terms`` summands may differ from the exact one.

    Cotangents are scaled in float32; the sum is formed in ``product``, or float32 ones, with ``tiles``, on tensor cores
    (SOUNDNESS Theorem 24). Where positions cancel, the gradient is far smaller than that product, so a cap on the exact
    norm needs this share on top.
    """
    if product == torch.float32 and tiles:
        return 2.0**-23 + (terms + 8) * 2.0**-22
    return 2.0**-23 + (terms + 4) * (2.0**-23 if product == torch.float32 else 2.0**-52)


def beta_of(part: Any) -> float:
    """The weight of the bias in the input factor, zero if it is not trained."""
    return part._wc_beta if trains(part)[1] else 0.0


def apart(part: Any, wide: bool) -> tuple[torch.dtype, int]:
    """Type and chunk of a part's products; ``wide``: float64, but for products of one record each, whose sum is."""
    product = part._wc_product
    return (torch.float64, 0) if wide and product.chunk != 1 else (product.dtype, product.chunk)


def formed_in(part: Any, x: Tensor) -> torch.dtype:
    """Type of a convolution's products, for their norms: tiles take none of a 1-D one, not even of several rows."""
    product = part._wc_product.dtype, part._wc_product.chunk
    return (of_one_record(product, x) if x.dim() == 4 > part.weight.dim() else product)[0]


def trains(part: Any) -> tuple[bool, bool]:
    """Whether weight and bias are trained."""
    held = part.__dict__.get("_parameters")  # where a module finds them in the end, at a fifth of the price
    if held is not None and "weight" in held and "bias" in held:
        weight, bias = held["weight"], held["bias"]
    else:
        weight, bias = part.weight, getattr(part, "bias", None)
    return weight.requires_grad, bias is not None and bias.requires_grad


def trained_input(part: Any, x: Tensor) -> Tensor:
    """The input factor as far as it makes a gradient: where only the bias is trained, not at all."""
    return x if part.weight.requires_grad else torch.zeros_like(x)


class Eager(torch.autograd.Function):
    """A Function for ordinary use, called faster; under a transform torch refuses it as any without setup_context."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As ``Function.apply``, without a look at each argument for remains of a transform."""
        return super().apply(*args) if transforms_active() else apply_directly(cls, *args)


def eager_twin(function: type[torch.autograd.Function]) -> type[Eager]:
    """The same Function with forward and setup_context in one: outside transforms torch calls it far faster.

    ``torch.func`` and ``torch.compile`` need the original.
    """

    def forward(ctx, *args):
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": function.backward}
    return type(f"Eager{function.__name__}", (Eager,), methods)


def unchunked(dtype: torch.dtype, chunk: int) -> tuple[torch.dtype, int]:
    """Type and chunk of a product. A compiler would unroll chunks and compile anew for every batch size: float64 then.

    One float64 product rounds less than the chunks it stands for, so that their sensitivity holds for it.
    """
    return (torch.float64, 0) if chunk > 0 and torch.compiler.is_compiling() else (dtype, chunk)


def of_one_record(product: tuple[torch.dtype, int], x: Tensor) -> tuple[torch.dtype, int]:
    """Type and chunk where tiles cannot take the factors: float64 on a device, which rounds less, and no loop."""
    return (torch.float64, 0) if x.is_cuda and product == (torch.float32, 1) else product


def transforming() -> bool:
    """Whether a torch.func transform or the compiler is looking."""
    return torch.compiler.is_compiling() or transforms_active()


_AS_IT_IS = contextlib.nullcontext()


def no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """No casts inside; free of charge where there would be none anyway."""
    usual = not torch.is_autocast_enabled(device) and not transforming()
    return _AS_IT_IS if usual else torch.autocast(device, enabled=False)


@dataclass
class _Mode:
    plain_in: int | None = None  # the thread that asked for native forwards: another one may be training


_MODE = _Mode()


@contextlib.contextmanager
def plain_forward() -> Iterator[None]:
    """Inside, and in this thread only, private layers run their native forward and projections are off: for tracing."""
    before, _MODE.plain_in = _MODE.plain_in, threading.get_ident()
    try:
        yield
    finally:
        _MODE.plain_in = before


def is_plain() -> bool:
    """Whether native forwards were asked for in this thread."""
    return _MODE.plain_in is not None and _MODE.plain_in == threading.get_ident()
