"""CPU seconds of a default fit on Adult and on 1,000 of its rows: the first of a process, and the best of later ones.

python studies/benchmarks/fit_time.py --rounds 5 --against OTHER/src

Each measurement is a process of its own with one thread; with --against, another version of the package takes turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

_ONE = """
import json, sys, time, warnings
import pandas as pd
try:
    from weightclip import LipDPClassifier
except ImportError:  # versions before November 2026
    from weightclip.estimators import LipDPClassifier
warnings.simplefilter("ignore")
frame, schema, rows = pd.read_pickle(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
y = frame.pop("(y)").to_numpy()
times = []
for _ in range(4):
    start = time.process_time()
    LipDPClassifier(1.0, schema=schema, classes=[0, 1]).fit(frame[:rows], y[:rows])
    times.append(time.process_time() - start)
print(json.dumps([times[0], min(times[1:])]))
"""


def main() -> None:
    """Print medians over rounds, and the ratio."""
    from weightclip_studies import data

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", help="folder of another version of the package")
    arguments = parser.parse_args()
    table = data.load("adult")
    frame, here = table.to_pandas(), os.environ.get("PYTHONPATH", "")
    frame = frame[[c.name for c in table.columns]].assign(**{"(y)": table.target})
    schema = json.dumps(data.table_schema(table.schema).to_json())
    versions = {"this": here, **({"other": arguments.against} if arguments.against else {})}
    with tempfile.TemporaryDirectory() as scratch:
        frame.to_pickle(Path(scratch) / "adult")
        for rows in (round(0.64 * len(frame)), 1000):
            found: dict[str, list[list[float]]] = {name: [] for name in versions}
            for _ in range(arguments.rounds):
                for name, path in versions.items():
                    command = [sys.executable, "-c", _ONE, str(Path(scratch) / "adult"), schema, str(rows)]
                    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
                    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
                    found[name].append(json.loads(done.stdout))
            for place, what in enumerate(("first fit", "later fits")):
                seconds = {name: median(run[place] for run in runs) for name, runs in found.items()}
                ratio = f", ratio {seconds['this'] / seconds['other']:.2f}" if arguments.against else ""
                print(f"{rows} rows, {what}: " + ", ".join(f"{n} {s:.3f} s" for n, s in seconds.items()) + ratio)


if __name__ == "__main__":
    main()
