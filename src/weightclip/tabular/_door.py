"""The door through which statistics of records leave: counted where there is a ledger, with noise of its own."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightclip.accounting import Adjacency, Ledger, Mechanism
from weightclip.noise import Streams


@dataclass(frozen=True)
class Door:
    """Randomness of a fit's statistics, and the ledger in which they are counted first.

    Attributes:
        streams: Randomness.
        ledger: File in which every release is counted before it happens; None: the report alone counts.
    """

    streams: Streams
    ledger: Path | None = None

    def charge(self, mechanism: Mechanism) -> int:
        """Count one release; with a ledger it is on the disk when this returns."""
        if self.ledger is None:
            return 0
        book = Ledger(self.ledger)
        try:
            book.begin(mechanism, Adjacency.ADD_OR_REMOVE_ONE, 0.0, {"secure_noise": self.streams.is_secure})
            return book.charge()
        finally:
            book.close()

    def noise(self, values: np.ndarray, sigma: float, label: str) -> np.ndarray:
        """Standard normals for the one release of these sums under this label, which is charged first.

        Formal guarantees:
            With a ledger a Gaussian mechanism of multiplier `sigma` is counted, durably, before a number is drawn. The
            noise never meets two different sums: it has fresh bits of the operating system, or in a seeded fit it is a
            function of the seed, the label and the sums.
        """
        number = self.charge(Mechanism("gaussian", sigma, 1.0, 1, label=label))

        def content() -> bytes:
            digest = hashlib.blake2b(np.ascontiguousarray(values, dtype=np.float64).tobytes(), digest_size=32)
            digest.update(repr((values.shape, sigma, label)).encode())
            return digest.digest()

        return self.streams.for_release(number, content).numpy(label).standard_normal(values.shape)


def charged(ledger: str | os.PathLike[str] | None) -> tuple[Mechanism, ...]:
    """Everything that a ledger holds; nothing without one."""
    if ledger is None:
        return ()
    book = Ledger(ledger)
    try:
        return tuple(book.mechanisms())
    finally:
        book.close()
