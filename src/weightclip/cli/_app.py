"""The typer application: finds the commands, turns our errors into one line and an exit code."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from weightclip.errors import WeightclipError

COMMANDS = ("train", "predict", "certify", "verify", "audit", "reproduce", "tune", "bench", "data")
"""In the order ``--help`` shows them; each lives in ``_<name>.py`` as a function or as a typer ``app`` of its own."""

# typer carries click inside or depends on it, by version: its base error is found through the public one
_UsageErrors: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="weightclip",
    help="Differentially private training at the speed of ordinary training, and audits of what it claims.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        from weightclip import __version__

        typer.echo(f"weightclip {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def _register() -> None:
    for name in COMMANDS:
        place = f"weightclip.cli._{name}"
        if importlib.util.find_spec(place) is None:
            continue
        module = import_module(place)
        if isinstance(getattr(module, "app", None), typer.Typer):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))


_register()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 only on success, 1 on an error of ours, 2 on bad options.

    Errors are one line on stderr; WEIGHTCLIP_DEBUG=1 shows where they come from.
    """
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except _UsageErrors as error:
        if os.environ.get("WEIGHTCLIP_DEBUG") == "1":
            raise
        code = _complain(error.format_message(), error.exit_code)  # type: ignore[attr-defined]
    except typer.Abort:
        code = _complain("interrupted", 130)
    except WeightclipError as error:
        if os.environ.get("WEIGHTCLIP_DEBUG") == "1":
            raise
        code = _complain(str(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    if message.strip():  # help shown instead of a missing command needs no complaint
        print("error: " + " ".join(message.split()), file=sys.stderr)
    return code
