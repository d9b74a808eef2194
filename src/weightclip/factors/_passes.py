"""What private layers and copied parameters know of the pass that is running: how many records, and who has which rows.

Found out once, on public records, before anything is trained (:meth:`Passes.discover`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from weightclip._torch import tensors_of
from weightclip.errors import ContractError
from weightclip.factors._limits import is_plain
from weightclip.factors._rows import NONE, RECORDS, SIZES, Layout, RowTable


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
        sizes = [t.shape[0] for t in tensors_of((args, kwargs)) if t.dim()]
        self.records, self.running = sizes[0] if sizes else 0, True

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running = False

    _before._weightclip = _after._weightclip = True  # type: ignore[attr-defined] # hooks of ours, left out of copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        return Passes()

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, ()
