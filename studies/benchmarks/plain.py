"""A command of the studies on a machine whose typer cannot run (it needs compiled parts): options by argparse.

``python3 plain.py text --plan`` calls the function ``text`` of ``weightclip_studies.cli._text`` with what its signature
says of ``--plan``; ``python3 plain.py extractor:plan`` is ``weightclip-study extractor plan``. Limits that typer would
check (``min=``) are not checked here.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any


def parser(function: Callable[..., Any]) -> argparse.ArgumentParser:
    """Options of a function, from its signature: flags for truth values, repeatable options for lists."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, several = _kind(hints[name])
        option: dict[str, Any] = {"dest": name, "default": parameter.default}
        if parameter.default is inspect.Parameter.empty:
            option.update(required=True, default=None)
        if kind is bool:
            option["action"] = argparse.BooleanOptionalAction if parameter.default else "store_true"
        else:
            option.update(type=kind, action="append" if several else "store")
        made.add_argument("--" + name.replace("_", "-"), **option)
    return made


def _kind(hint: Any) -> tuple[Any, bool]:
    """What one value is made by, and whether there may be several."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


def main(arguments: Sequence[str]) -> None:
    """Run the command; errors of ours are one line."""
    module, _, name = arguments[0].partition(":")
    function = getattr(importlib.import_module(f"weightclip_studies.cli._{module}"), name or module)
    from weightclip.errors import WeightclipError

    try:
        function(**vars(parser(function).parse_args(arguments[1:])))
    except WeightclipError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
