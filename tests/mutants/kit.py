"""Mistakes made on purpose, each with the check that must notice it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Mutate = Callable[[pytest.MonkeyPatch], None]


class Mutants(dict[str, tuple[Mutate, Callable[[], object]]]):
    """By name: what breaks the code, and who must notice."""

    def noticed_by(self, check: Callable[[], object]) -> Callable[[Mutate], Mutate]:
        """Keep the decorated mistake under its own name."""

        def keep(mutate: Mutate) -> Mutate:
            self[mutate.__name__] = (mutate, check)
            return mutate

        return keep
