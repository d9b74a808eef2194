"""The ledger of several processes: rank 0 holds the file, the others know what it has told them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightclip.accounting import Ledger, Mechanism
from weightclip.errors import ContractError

if TYPE_CHECKING:
    from weightclip.distributed._ranks import ManyRanks


class SharedLedger:
    """A :class:`weightclip.accounting.Ledger` for all ranks. Charging is common work; reading waits for nobody.

    Formal guarantees:
        :meth:`charge` returns on any rank after the charge is on rank 0's disk, and the same number on every rank: a
        rank that dies before or after it costs at most one charge whose release nobody has seen. The count that a rank
        reads is the one rank 0's file held when all ranks last charged.
    """

    def __init__(self, ranks: ManyRanks, path: Any, block: int) -> None:
        self.path, self._ranks = Path(os.path.abspath(path)), ranks
        self._book: Ledger | None = None
        self._charges, self._state, self._mechanisms = 0, dict[str, Any](), list[Mechanism]()

        def opened() -> None:
            self._book = Ledger(path, block)

        ranks.agree(lambda: {"PrivacyEngine(ledger=...)": str(block).encode()})
        self._on_first(opened)

    def _on_first(self, act: Callable[[], Any]) -> Any:
        """Rank 0 acts on the file; all ranks get the outcome, and what the file says then."""

        def told() -> tuple[Any, int, dict[str, Any], list[Mechanism]]:
            outcome, book = act(), self._book
            assert book is not None
            return outcome, book.charges, book.state(), book.mechanisms()

        outcome, self._charges, self._state, self._mechanisms = self._ranks.tell(told)
        return outcome

    @property
    def charges(self) -> int:
        """Numbers given out so far."""
        return self._charges

    def mechanisms(self) -> list[Mechanism]:
        """Everything charged so far, by all runs."""
        return list(self._mechanisms)

    def state(self) -> dict[str, Any]:
        """Which ledger this is and how far it has come: JSON-ready."""
        return dict(self._state)

    def knows(self, head: str) -> bool:
        """Whether some line had this checksum; asked on rank 0, which has the file."""
        return self._file.knows(head)

    def begin(self, *run: Any) -> None:
        """Enter a run, as :meth:`weightclip.accounting.Ledger.begin`."""
        self._on_first(lambda: self._file.begin(*run))

    def charge(self, left: int | None = None) -> int:
        """The number of the next release, which is on rank 0's disk when this returns on any rank."""
        return self._on_first(lambda: self._file.charge(left))

    def sigma_within(self, *settings: Any) -> float:
        """As :meth:`weightclip.accounting.Ledger.sigma_within`, the same number on all ranks."""
        return self._on_first(lambda: self._file.sigma_within(*settings))

    def close(self) -> None:
        """Let another engine have the file."""
        if self._book is not None:
            self._book.close()

    @property
    def _file(self) -> Ledger:
        if self._book is None:
            raise ContractError(f"the ledger {self.path} is held by rank 0: ask there.")
        return self._book

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedLedger:
        return self  # copies of an engine charge the same ledger
