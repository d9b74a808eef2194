"""The typer application: finds the commands, turns our errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from weightclip.errors import WeightclipError

COMMANDS = ("train", "predict", "certify", "verify", "importances", "audit", "tune")
"""In the order ``--help`` shows them; each lives in ``_<name>.py`` as a function or as a typer ``app`` of its own."""

MOVED = ("reproduce", "bench", "data")
"""Commands that are now those of the studies."""

_LONGEST = 1000  # characters of an error: options may be of any length

# typer carries click inside or depends on it, by version: its base error is found through the public one
_UsageErrors: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _version(value: bool) -> None:
    if value:
        from weightclip import __version__

        typer.echo(f"weightclip {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def assemble(name: str, help: str, package: str, commands: Sequence[str]) -> typer.Typer:
    """An application of the commands in ``package``: one file ``_<command>.py`` each."""
    app = typer.Typer(
        name=name, help=help, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    )  # fmt: skip
    app.callback()(_options)
    for command in commands:
        module = import_module(f"{package}._{command}")
        if isinstance(getattr(module, "app", None), typer.Typer):
            app.add_typer(module.app, name=command)
        else:
            app.command(command)(getattr(module, command))
    return app


app = assemble(
    "weightclip",
    "Differentially private training at the speed of ordinary training, and audits of what it claims.",
    "weightclip.cli",
    COMMANDS,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``weightclip`` and exit, as `run` does; a command that has moved says where to."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in MOVED:
        where = "`pip install -e studies` in a checkout of the repository brings it"
        sys.exit(_complain(f"weightclip {words[0]} is now: weightclip-study {words[0]} ({where}).", 2))
    run(app, words)


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit: 0 only on success, 1 on an error of ours, 2 on bad options.

    Errors are one line on stderr; WEIGHTCLIP_DEBUG=1 shows where they come from. Being told to stop (SIGTERM, SIGHUP)
    ends the command as an error does: what is half done is cleaned up on the way.
    """
    with _stopped_by_signals():
        code = _run(app, arguments)
    sys.exit(code if isinstance(code, int) else 0)


def _run(app: typer.Typer, arguments: Sequence[str] | None) -> Any:
    try:
        return app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except typer.Abort:
        return _complain("interrupted", 130)
    except Exception as error:
        if os.environ.get("WEIGHTCLIP_DEBUG") == "1":
            raise
        if isinstance(error, _UsageErrors):
            return _complain(error.format_message(), error.exit_code)  # type: ignore[attr-defined]
        if isinstance(error, WeightclipError):
            return _complain(str(error), 1)
        if isinstance(error, OSError) and error.strerror:
            return _complain(f"{error.filename or 'a file'}: {error.strerror}.", 1)
        # its own text is left out: whatever it is, it was not written with private values in mind
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(last.filename)}:{last.lineno}"
        return _complain(f"unexpected {type(error).__name__} at {place}; WEIGHTCLIP_DEBUG=1 shows more.", 1)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an exception does, unless somebody handles them already."""
    mine = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        mine = {n: signal.signal(n, _stop) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, before in mine.items():
            signal.signal(number, before)


def _stop(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _complain(message: str, code: int) -> int:
    if message.strip():  # help shown instead of a missing command needs no complaint
        line = " ".join(message.split())
        print("error: " + (line if len(line) <= _LONGEST else line[:_LONGEST] + "..."), file=sys.stderr)
    return code
