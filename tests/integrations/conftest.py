"""Accelerate keeps its settings for the whole process: every test of a loop begins and ends without them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def _forget() -> None:
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState  # pyright: ignore[reportMissingImports]

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _forget()
    yield
    _forget()
