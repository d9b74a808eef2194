"""Everything that can be tested on one machine, with a log: ``python tools/test_full.py``, by ``make test-full``.

The whole suite with its long tests (WEIGHTCLIP_FULL=1), the core tests and a fresh install with the declared minimum
and with the newest torch. The log is results/tests/full.log; paths of this machine are left out of it.
``python tools/test_full.py test-torch test-install`` runs these steps alone, and adds to the log.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from releases import ROOT

STEPS = [
    ["test"],
    ["test-torch", "TORCH=minimum"],
    ["test-torch", "TORCH=newest"],
    ["test-install", "TORCH=minimum"],
    ["test-install", "TORCH=newest"],
]
LOG = ROOT / "results" / "tests" / "full.log"


def main() -> None:
    """Run every step, also after one that failed; the exit code is 0 if none did."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    chosen = set(sys.argv[1:])
    if unknown := chosen - {step[0] for step in STEPS}:
        sys.exit(f"tools/test_full.py: there is no step {min(unknown)!r}: test, test-torch or test-install.")
    summary = []
    with LOG.open("a" if chosen else "w") as log:

        def say(text: str) -> None:
            text = text.replace(str(ROOT), ".").replace(str(Path.home()), "~")
            log.write(text)
            log.flush()
            sys.stdout.write(text)
            sys.stdout.flush()

        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        say(f"== at commit {commit.stdout.strip() or 'unknown'}\n")
        for step in [step for step in STEPS if not chosen or step[0] in chosen]:
            name, began = "make " + " ".join(step), time.perf_counter()
            say(f"== {name}\n")
            command = ["make", "--no-print-directory", *step]
            settings = {**os.environ, "WEIGHTCLIP_FULL": "1"}
            with subprocess.Popen(
                command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as running:
                assert running.stdout is not None
                for line in running.stdout:
                    say(line)
            outcome = "passed" if running.returncode == 0 else f"FAILED ({running.returncode})"
            summary.append(f"{outcome}  {time.perf_counter() - began:6.0f} s  {name}\n")
        say("== summary\n" + "".join(summary))
    sys.exit(any(not line.startswith("passed") for line in summary))


if __name__ == "__main__":
    main()
