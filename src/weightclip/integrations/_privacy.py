"""What every integration is told about privacy, and the batches that a framework's loop is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weightclip.certificate import Bounds
from weightclip.engine import PrivacyEngine
from weightclip.errors import ContractError


@dataclass(frozen=True)
class Privacy:
    """The budget of a run, and how records are limited.

    Attributes:
        epsilon: Of the whole run.
        delta: Far below 1 / number of records.
        bounds: How each record is limited; by default its whole gradient is capped at norm 1.
        max_physical_batch_size: Draws are computed in pieces of at most this many records.
        ledger: A file in which every release is counted before it happens.
        show_losses: Let the framework see, print and log training losses. They are computed from the records and *not*
            covered by epsilon; by default the loop gets NaN in their place.
        settings: Further arguments of :meth:`weightclip.PrivacyEngine.make_private`, by name.
    """

    epsilon: float
    delta: float
    bounds: Bounds | None = None
    max_physical_batch_size: int | None = None
    ledger: Any = None
    show_losses: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def engage(self, *, epochs: float, divides: bool = False, **parts: Any) -> PrivacyEngine:
        """An engine on these parts (``module``, ``optimizer``, ``data_loader``, ``criterion``) with this budget.

        ``divides``: the framework divides the loss by the number of pieces before its backward pass.

        Formal guarantees:
            Those of :meth:`weightclip.PrivacyEngine.make_private_with_epsilon`. Unless ``show_losses``, the value of
            the private criterion under gradients is NaN, whatever the records are.
        """
        engine, size = PrivacyEngine(ledger=self.ledger), self.max_physical_batch_size
        settings = {"bounds": self.bounds, "max_physical_batch_size": size, **self.settings, **parts}
        engine.make_private_with_epsilon(
            target_epsilon=self.epsilon, target_delta=self.delta, epochs=epochs, **settings
        )
        engine.criterion.shows_values = self.show_losses
        if divides:
            engine.loss_scale = 1 / engine.loader.pieces
        return engine

    def accumulating(self, size: int, steps: int, records: int) -> Privacy:
        """The same where a framework accumulates gradients: draws of ``size * steps``, in pieces of ``size``."""
        if steps == 1:
            return self
        rate = min(1.0, size * steps / records)
        sizes = {"expected_batch_size": size * steps, "sample_rate": rate, **self.settings}
        return replace(self, max_physical_batch_size=self.max_physical_batch_size or size, settings=sizes)


UNCOUNTED = (
    "a checkpoint of the framework does not know how often it was released: start anew, save and load with the engine, "
    "or train with the Privacy(ledger=...) that counted the run it is of."
)


def refuse_uncounted(engine: PrivacyEngine) -> None:
    """Before a framework loads a state of its own: refused where no ledger holds earlier releases.

    Which releases a state is of cannot be seen from it: that they are those of the ledger is the user's to see to.
    """
    if engine.ledger is None or engine.steps == 0:
        raise ContractError(UNCOUNTED)


class Batches:
    """The physical batches of an engine's loader, counted as frameworks count: all pieces of all draws of a pass.

    Attributes:
        engine: Whose loader it is.
        dataset: Of the loader.
    """

    def __init__(self, engine: PrivacyEngine, place: Callable[[Any], Any] = lambda batch: batch) -> None:
        self.engine, self.dataset, self._place = engine, engine.loader.dataset, place

    def __len__(self) -> int:
        return len(self.engine.loader) * self.engine.loader.pieces

    def __iter__(self) -> Iterator[Any]:
        return map(self._place, iter(self.engine.loader))
