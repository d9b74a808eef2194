"""``weightclip train`` that is there to be killed: ``python resume_child.py FOLDER``.

Each line of its input is JSON: a command line, and the release at which the forked process that runs it kills itself
(0: never), before or after noise was added. Every release adds a byte to ``released`` in FOLDER; the two halves of a
regressor's last look, which are charged as one mechanism, add one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import weightclip.tabular._private as private
from weightclip.cli import main
from weightclip.noise._release import Release

HALF = "target/mean"  # what the first half of the last look is called


def watch(folder: Path, last: int, before: bool) -> None:
    """Count releases outside the ledger, and die at one of them."""
    counter = os.open(folder / "released", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen = [0]

    def watched(real: Any, mark: bytes) -> Any:
        def release(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == last and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if not any(isinstance(argument, str) and argument == HALF for argument in args):
                os.write(counter, mark)
            if seen[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return release

    private.release = watched(private.release, b"s")
    Release.release = watched(Release.release, b"g")  # type: ignore[method-assign]


def serve() -> None:
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                out = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                watch(folder, order["last"], order["before"])
                main(order["arguments"])
            except SystemExit as end:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code if isinstance(end.code, int) else 0)
            except BaseException:
                (folder / "failed").write_text(traceback.format_exc())
            os._exit(99)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
