"""A process that has imported everything and forks a command for each order it reads, to be killed at a given moment.

Importing torch takes seconds: without this most kills would hit the import. Orders and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import weightclip.tabular._fit  # noqa: F401 - so that no child imports it
from weightclip.cli import main


def child(arguments: list[str]) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    try:
        main(arguments)
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 0)
    os._exit(99)


def serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(order["arguments"])
        if order["signal"]:
            time.sleep(order["delay"])
            os.kill(pid, getattr(signal, order["signal"]))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"status": status, "seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    serve()
