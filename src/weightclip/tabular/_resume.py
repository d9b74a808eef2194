"""A fit that can be killed and resumed: what preprocessing released, and the training, in a folder beside the model.

Only released values are kept there. How much was spent is never read from it: the ledger counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from safetensors import SafetensorError

from weightclip.accounting import Ledger, Mechanism
from weightclip.errors import ContractError, WeightclipError
from weightclip.nn import ParameterAverage
from weightclip.tabular._encoder import Encoder, Fitted
from weightclip.tabular._target import Target

_STAGE, _ENGINE, _AVERAGE, _LOOK = "stage.json", "engine", "average.safetensors", "look.json"


@dataclass(frozen=True)
class Stage:
    """What a fit has released before its training begins."""

    fitted: Fitted  # encoder and mechanisms, those of a last look after training included
    target: Target | None = None  # how a numeric target is scaled; None for classes
    check: float = 0.0  # noise multiplier of the last look; 0 without one

    @property
    def look(self) -> Mechanism | None:
        """The last look, charged when it is made; all other mechanisms were charged before the training."""
        return self.fitted.mechanisms[-1] if self.check > 0 else None

    @property
    def charged(self) -> int:
        """Charges of everything before the training."""
        return sum(m.steps for m in self.fitted.mechanisms) - (self.look is not None)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        f, t = self.fitted, self.target
        return {
            "columns": f.encoder.to_json(), "shift": f.encoder.shift_json(),
            "mechanisms": [[m.kind, m.sigma, m.q, m.steps, m.epsilon0, m.label] for m in f.mechanisms],
            "statements": list(f.statements), "uncovered": list(f.uncovered), "check": self.check,
            "target": None if t is None else [t.low, t.high, t.middle, t.unit],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Stage:
        """The inverse of `to_json`."""
        fitted = Fitted(
            Encoder.from_json(data["columns"], data["shift"]), tuple(Mechanism(*m) for m in data["mechanisms"]),
            tuple(data["statements"]), tuple(data["uncovered"]),
        )  # fmt: skip
        return cls(fitted, None if data["target"] is None else Target(*data["target"]), float(data["check"]))


@dataclass(frozen=True)
class Checkpoint:
    """A folder in which an interrupted fit is found again."""

    folder: Path  # the folder; made when there is something to keep
    options: str  # public options of the fit, as text: another fit must not go on with this one's values

    @property
    def begun(self) -> bool:
        """Whether a fit has come as far as its training."""
        return (self.folder / _STAGE).is_file()

    def begin(self, ledger: Ledger) -> None:
        """What is charged to the ledger from here on is this fit's."""
        ledger.fit = self._kept()["fit"]

    def alone(self, ledger: Ledger) -> bool:
        """Whether the ledger is the one from before the training, and counts nothing but this fit since then."""
        kept = self._kept()
        return kept["ledger"] is not None and ledger.counts_only(kept["fit"], kept["ledger"])

    def _kept(self) -> dict[str, Any]:
        return json.loads((self.folder / _STAGE).read_text(encoding="utf-8"))

    @property
    def engine(self) -> Path:
        """Where the engine saves weights and optimiser."""
        return self.folder / _ENGINE

    def stage(self, make: Callable[[], Stage], ledger: Path | None = None) -> Stage:
        """What was released before the training: as kept, or made and kept now, with what the ledger holds then."""
        place = self.folder / _STAGE
        try:
            kept = json.loads(place.read_text(encoding="utf-8"))
            if kept["options"] != self.options:
                raise WeightclipError(
                    f"{self.folder} holds an interrupted run with other options: repeat those, or remove the folder."
                )
            kept["fit"]  # older versions gave no names
            if (ledger is None) != (kept["ledger"] is None):
                raise WeightclipError(
                    f"{self.folder} holds a run with another --ledger: repeat it, or remove the folder."
                )
            return Stage.from_json(kept["stage"])
        except FileNotFoundError:
            pass
        except WeightclipError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightclipError(f"{place} cannot be read ({type(error).__name__}): remove {self.folder}.") from error
        stage = make()
        mark = None
        if ledger is not None:
            with contextlib.closing(Ledger(ledger)) as book:
                mark = book.mark()  # how far it has come
        if mark is not None and mark["charges"] != stage.charged:
            raise ContractError(f"ledger {ledger} was charged by another run during this fit: start again.")
        told = {"options": self.options, "stage": stage.to_json(), "ledger": mark, "fit": secrets.token_hex(8)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(place, json.dumps(told, default=_plain).encode())
        except OSError as error:
            raise WeightclipError(f"cannot write {place} ({error.strerror or error}).") from error
        return stage

    def once(self, make: Callable[[], tuple[float, float]], default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers that are released once, however often the fit is killed: as kept, or made and kept now.

        Formal guarantees:
            `make` runs at most once in the life of the folder: where it was begun and its result is lost, `default`
            takes its place, because a second release was not charged.
        """
        place = self.folder / _LOOK
        try:
            if place.exists():
                first, second = json.loads(place.read_text(encoding="utf-8")) or default
                return float(first), float(second)
            _write(place, b"null")
            found = make()
            _write(place, json.dumps(found).encode())
        except WeightclipError:  # the ledger is held by another run: nothing was charged
            place.unlink(missing_ok=True)
            raise
        except (OSError, ValueError, TypeError) as error:
            raise WeightclipError(f"cannot use {place} ({type(error).__name__}): remove {self.folder}.") from error
        return found

    def save_average(self, average: ParameterAverage) -> None:
        """Keep the average of the weights."""
        _write(self.folder / _AVERAGE, safetensors.torch.save(average.state_dict()["average"]))

    def load_average(self, average: ParameterAverage) -> None:
        """Take up the average again, if one was kept."""
        place = self.folder / _AVERAGE
        if not place.is_file():
            return
        try:
            kept = safetensors.torch.load_file(place)
            ordered = {name: kept[name] for name in average.state_dict()["average"]}
            average.load_state_dict({"steps": 1, "average": ordered})
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise WeightclipError(f"{place} cannot be read ({type(error).__name__}): remove {self.folder}.") from error


def _write(place: Path, data: bytes) -> None:
    """Write a file in one step, and wait for the disk."""
    scratch = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, place)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(type(value).__name__)
