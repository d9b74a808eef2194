"""Training loops of other libraries: Hugging Face Trainer and Accelerate, Lightning, skorch. Thin and optional.

A library is imported when its name below is first used. Imports `certificate`, `distributed`, `engine` and `losses`; no
room imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightclip.integrations._privacy import Privacy as Privacy

if TYPE_CHECKING:
    from weightclip.integrations._accelerate import prepare as prepare
    from weightclip.integrations._lightning import PlainDDP as PlainDDP
    from weightclip.integrations._lightning import make_private_module as make_private_module
    from weightclip.integrations._skorch import PrivateNet as PrivateNet
    from weightclip.integrations._trainer import PrivateTrainer as PrivateTrainer

_HOMES = {
    "prepare": "_accelerate",
    "make_private_module": "_lightning",
    "PlainDDP": "_lightning",
    "PrivateNet": "_skorch",
    "PrivateTrainer": "_trainer",
}

__all__ = ["Privacy", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightclip.integrations' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"weightclip.integrations.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
