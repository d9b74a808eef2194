"""The pass that is running: whose rows are whose (SOUNDNESS section 7, condition b), and where its products go.

Which dimension of a tensor holds the records, and how many rows each has, is found by running the model on two numbers
of public records (:meth:`Passes.discover`): the one dimension that grows with them is theirs. What was found is what
every later pass must repeat; anything else is refused.

A private layer of a running engine returns no weight gradient to autograd: its backward hands both factors of the
product to the engine's collector (:func:`collect`), which limits each record and adds the sum to the release. Nothing
lies between the product and the release that could multiply it: no chain to a parameter, no hook, no second derivative
(condition c).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._torch import inputs_of
from weightclip.errors import ContractError
from weightclip.factors._limits import is_plain

SIZES = ((7, 2), (5, 3))  # numbers of public records; a model may not take every one


@dataclass(frozen=True)
class Layout:
    """Rows i*m .. (i+1)*m - 1 of dimension ``dim`` are record i's; m = 0: no dimension holds records."""

    dim: int = 0
    m: int = 1


RECORDS, NONE = Layout(), Layout(0, 0)


def layout_between(
    one: Sequence[int], other: Sequence[int], sizes: tuple[int, int] = SIZES[0]
) -> Layout | None:  # fmt: skip
    """The layout of a tensor that has these shapes for these numbers of records; None if there is none."""
    if len(one) != len(other):
        return None
    grown = [k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if not grown:
        return NONE
    (a, b), (many, few) = (one[grown[0]], other[grown[0]]), sizes
    fits = len(grown) == 1 and a % many == 0 and a // many * few == b
    return Layout(grown[0], a // many) if fits else None


@dataclass
class RowTable:
    """What two runs found: the layouts of each place's tensors, by their number of dimensions.

    A place is whatever names a use: a private layer, or an argument of an operator on a copied parameter.
    """

    sizes: tuple[int, int] = SIZES[0]
    layouts: dict[tuple[Hashable, int], set[Layout]] = field(default_factory=dict)
    uses: dict[Hashable, int] = field(default_factory=dict)

    def learn(self, one: dict[Hashable, list], other: dict[Hashable, list], names: dict[Hashable, str]) -> None:
        """Compare the shapes that the runs noted, place by place."""
        for place in one.keys() | other.keys():
            many, few = one.get(place, []), other.get(place, [])
            name, (n, k) = names.get(place, "a layer"), self.sizes
            if len(many) != len(few):
                raise ContractError(
                    f"{name} is used {len(many)} times for {n} records and {len(few)} times for {k}: what runs must "
                    "not depend on the batch size."
                )
            self.uses[place] = len(many)
            for a, b in zip(many, few, strict=True):
                found = layout_between(a, b, self.sizes)
                if found is None:
                    raise ContractError(
                        f"{name} gets a tensor of shape {tuple(a)} for {n} records and {tuple(b)} for {k}: one "
                        "dimension must hold the records, each with as many rows."
                    )
                self._add(place, len(a), found, names)
                if found == NONE:  # every record gets its own copy, in front
                    self._add(place, len(a) + 1, RECORDS, names)

    def _add(self, place: Hashable, dims: int, layout: Layout, names: dict[Hashable, str]) -> None:
        known = self.layouts.setdefault((place, dims), set())
        known.add(layout)
        if len({(k.dim, k.m == 0) for k in known}) > 1:
            raise ContractError(
                f"{names.get(place, 'a layer')} gets records on different dimensions of tensors with {dims} "
                "dimensions: keep records on dimension 0."
            )

    def find(self, place: Hashable, shape: Sequence[int], records: int) -> Layout | None:
        """The layout of a tensor at this place, if it is one that was found."""
        for layout in self.layouts.get((place, len(shape)), ()):
            if layout.m == 0 or shape[layout.dim] == records * layout.m:
                return layout
        return None


class Passes:
    """The running pass of one model.

    Attributes:
        records: Of the pass that ran last (rows of the model's input).
        running: Whether parameters that need it stand for copies: inside the model's forward, or a backward pass that
            computes activations again.
        noting: The shapes a run on public records has met so far, by place; None while training.
        signature: Of the running pass: what is public of its shapes and modes.
        prepare: Called before a pass under gradients; returns its signature, and may discover it.
        deep: Whether that run follows copied parameters through operators as well.
    """

    def __init__(self) -> None:
        self.records, self.running = 0, False
        self.noting: dict[Hashable, list[tuple[int, ...]]] | None = None
        self.deep = False
        self.signature: Hashable = None
        self.prepare: Callable[[nn.Module, Any, Any], Hashable] | None = None
        self.tables: dict[Hashable, RowTable] = {}
        self.names: dict[Hashable, str] = {}  # of places, for errors
        self._numbers: dict[Hashable, int] = {}

    @property
    def table(self) -> RowTable | None:
        """What was found for passes like the present one."""
        return self.tables.get(self.signature)

    def place(self, *key: Hashable) -> int:
        """A short name for a place that is named by other places."""
        return self._numbers.setdefault(key, len(self._numbers))

    def note(self, place: Hashable, shape: Any, name: str) -> None:
        """While discovering: a tensor of this shape was met at this place."""
        assert self.noting is not None
        self.noting.setdefault(place, []).append(tuple(shape))
        self.names.setdefault(place, name)

    def layout(self, place: Hashable, shape: Any) -> Layout:
        """Where the records of a tensor at this place lie; refuses what was not found on public records."""
        table = self.table
        found = RECORDS if table is None else table.find(place, shape, self.records)
        if found is None:
            raise ContractError(
                f"{self.names.get(place, 'a layer')} got a tensor of shape {tuple(shape)} in a batch of {self.records} "
                "records, unlike anything the test on public records has seen: rows of a product must be records. Keep "
                "records on dimension 0, and give make_private an example= of this shape."
            )
        return found

    def is_copy(self, place: Hashable, dims: int) -> bool:
        """Whether tensors at this place hold no records, so that every record gets its own copy of them."""
        return self.table is not None and NONE in self.table.layouts.get((place, dims), ())

    def discover(
        self, run: Callable[[int], Any], signature: Hashable = None, others: Sequence[Callable[[int], Any]] = ()
    ) -> RowTable:
        """Find the layouts of passes of one public signature by ``run(n)``, a forward pass over n public records.

        ``others`` may take other ways through the model; one that does not run is left out. Raises what ``run`` raises
        if the model takes none of the numbers of records that are tried.

        Formal guarantees:
            ``run`` must use public records only. What is found is compared with every later pass of that signature;
            whether it is true (no record in another's rows) is what the test of independence shows.
        """
        for sizes in SIZES:
            try:
                return self._discover(run, signature, RowTable(sizes), others)
            except (RuntimeError, IndexError, ValueError) as error:
                if isinstance(error, ContractError) or sizes is SIZES[-1]:
                    raise
        raise AssertionError

    @torch.enable_grad()  # without gradients some layers of torch take other ways
    def _discover(
        self, run: Callable[[int], Any], signature: Hashable, table: RowTable, others: Sequence[Callable[[int], Any]]
    ) -> RowTable:
        before = self.signature
        self.signature, self.tables[signature] = signature, table
        try:
            # layers first. Then operators on copies, as far as these go: how far shows once their results are known
            while self._learn(run, table) or not self.deep:
                self.deep = True
            for other in others:
                with contextlib.suppress(RuntimeError, IndexError, ValueError):
                    while self._learn(other, table):
                        pass
        except BaseException:
            del self.tables[signature]
            raise
        finally:
            self.noting, self.running, self.deep, self.signature = None, False, False, before
        for (place, _), layouts in table.layouts.items():
            if NONE in layouts and hasattr(place, "_wc_lone"):
                place._wc_lone = True  # type: ignore[attr-defined]
        return table

    def _learn(self, run: Callable[[int], Any], table: RowTable) -> bool:
        """Two runs; whether they came to places that no run had seen."""
        found = []
        for records in table.sizes:
            self.noting, self.records, self.running = {}, records, True
            run(records)
            found.append({place: shapes for place, shapes in self.noting.items() if place not in table.uses})
        many, few = found
        table.learn(many, few, self.names)
        return bool(many or few)

    def watch(self, model: nn.Module, moved: bool) -> Any:
        """A hook that says when a pass begins and over how many records; the caller removes it.

        It must be the first: ``moved`` puts it in front of those that are there.
        """
        return model.register_forward_pre_hook(self._before, prepend=moved, with_kwargs=True)

    def watch_end(self, model: nn.Module) -> Any:
        """A hook that says when a pass is over, whatever comes of it; the caller removes it."""
        return model.register_forward_hook(self._after, always_call=True)

    @contextlib.contextmanager
    def testing(self, signature: Hashable) -> Iterator[None]:
        """Passes over public records of this signature, for which nothing need be prepared."""
        before, prepare = self.signature, self.prepare
        self.signature, self.prepare = signature, None
        try:
            yield
        finally:
            self.signature, self.prepare = before, prepare

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or is_plain() or not torch.is_grad_enabled():
            return
        if self.prepare is not None:
            self.signature = self.prepare(module, args, kwargs)
        if self.table is None and self.noting is None:
            return
        self.records, self.running = next((t.shape[0] for t in inputs_of(args, kwargs) if t.dim()), 0), True

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running = False

    _before._weightclip = _after._weightclip = True  # type: ignore[attr-defined] # hooks of ours, left out of copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        return Passes()

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, ()


_keys = itertools.count(1)
_sinks: weakref.WeakValueDictionary[int, Sink] = weakref.WeakValueDictionary()


class Sink:
    """Where the products of one layer go.

    Attributes:
        key: Its number; compiled graphs know it by that.
        on: Whether products are collected; audits switch it off to differentiate the limited product itself.
        anchor: What links the layer to a backward pass in place of its parameters, which autograd never sees.
        weights: The layer's parameters: nothing else may sit in their places.
        passes: What is known of the running pass.
    """

    def __init__(
        self, layer: nn.Module, anchor: Tensor, take: Callable[[Tensor, Tensor, bool, Sequence[int]], None],
        passes: Passes | None = None,
    ) -> None:  # fmt: skip
        self.key, self.on, self.anchor, self.take, self.passes = next(_keys), True, anchor, take, passes
        self.weights = {id(p): p.data_ptr() for p in layer.parameters(recurse=False)}
        self.parts: dict[Any, Any] = {}  # of a layer with several products, by what tells them apart
        self.attach: Callable[[Any], Sink] | None = None  # gives one more part its way to the collector
        _sinks[self.key] = self

    def check(self, weight: Tensor) -> None:
        """Only the parameter itself may be multiplied with inputs here, not a multiple of it."""
        if id(weight) not in self.weights and weight.data_ptr() not in self.weights.values():
            raise ContractError(
                "a private layer runs with another tensor in place of its parameter (functional_call, a "
                "parametrisation, an assignment): the limited gradient belongs to the parameter. Call the model itself."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied model trains on its own

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


def collect(key: int, token: Tensor, x: Tensor, d: Tensor, conf: Sequence[int] = ()) -> None:
    """Hand the two factors of a product to the collector behind ``key``; called inside a layer's backward.

    Args:
        key: Number of the layer's sink.
        token: A scalar that compiled graphs take for what is written, so that the call stays where it is.
        x: Input factor, records on dimension 0.
        d: Cotangent of the layer's output.
        conf: Numbers of this use that the forward pass went by (a convolution's), whatever the layer says by now.
    """
    if torch.compiler.is_compiling():
        torch.ops.weightclip.take(token, x, d, key, list(conf))
        return
    if torch.is_grad_enabled():
        raise ContractError(
            "a derivative of a private layer's gradient was asked for (create_graph=True, a gradient penalty): its "
            "products are limited for first derivatives only. Remove that term, or leave the layer out of it."
        )
    _deliver(key, x, d, False, conf)


def _deliver(key: int, x: Tensor, d: Tensor, borrowed: bool, conf: Sequence[int]) -> None:
    sink = _sinks.get(key)
    if sink is not None:  # an engine that is gone collects nothing
        sink.take(x, d, borrowed, conf)


def _take(token: Tensor, x: Tensor, d: Tensor, key: int, conf: list[int]) -> None:
    """What a compiled backward calls: opaque to the compiler, which may use the memory of both factors again."""
    with torch.no_grad():
        _deliver(key, x, d, True, conf)


# the plain way to define an operator: `custom_op` costs the host several times as much for every call
_LIBRARY = torch.library.Library("weightclip", "FRAGMENT")
_LIBRARY.define("take(Tensor(a!) token, Tensor x, Tensor d, int key, int[] conf) -> ()")
_LIBRARY.impl("take", _take, "CompositeExplicitAutograd")
torch.library.register_fake("weightclip::take", lambda token, x, d, key, conf: None, lib=_LIBRARY)
