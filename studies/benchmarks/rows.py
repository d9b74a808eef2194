"""CPU seconds and memory of one fit against the number of rows; each size in a process of its own, one thread.

python studies/benchmarks/rows.py --rows 2000000 --others --ebm PYTHON
python studies/benchmarks/rows.py --rows 10000000 --append
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

FIELDS: tuple[str, ...] = (
    "model", "rows", "columns", "cpu_s", "wall_s", "table_MB", "peak_MB", "accuracy",
    "boosting_cpu_s", "boosting_accuracy", "ebm_cpu_s", "ebm_accuracy",
)  # fmt: skip


def one(rows: int, columns: int, others: bool, ebm: str | None) -> dict[str, str]:
    """One fit; memory counts everything in the process, the table too."""
    import numpy as np

    from weightclip.tabular import LipDPClassifier

    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, columns))
    y = (X[:, 0] + X[:, 1] * X[:, 2] > 0).astype(np.int64)
    before = _peak()
    wall, cpu = time.perf_counter(), time.process_time()
    model = LipDPClassifier(epsilon=1.0, random_state=0, verbose=1, n_jobs=1, classes=[0, 1]).fit(X, y)
    result = {
        "model": "LipDPClassifier", "rows": str(rows), "columns": str(columns),
        "cpu_s": f"{time.process_time() - cpu:.1f}", "wall_s": f"{time.perf_counter() - wall:.1f}",
        "table_MB": f"{before / 1024:.0f}", "peak_MB": f"{_peak() / 1024:.0f}",
        "accuracy": f"{model.score(X[:20000], y[:20000]):.4f}",
    }  # fmt: skip
    if others:
        from sklearn.ensemble import HistGradientBoostingClassifier

        cpu = time.process_time()
        boosting = HistGradientBoostingClassifier(random_state=0).fit(X, y)
        result["boosting_cpu_s"] = f"{time.process_time() - cpu:.1f}"
        result["boosting_accuracy"] = f"{boosting.score(X[:20000], y[:20000]):.4f}"
    if ebm is not None:
        del X, y
        result |= _ebm(ebm, rows, columns)
    return result


_EBM = """
import sys, time, warnings
import numpy as np
from interpret.privacy import DPExplainableBoostingClassifier
warnings.simplefilter("ignore")
rows, columns = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
X = rng.normal(size=(rows, columns))
y = (X[:, 0] + X[:, 1] * X[:, 2] > 0).astype(np.int64)
bounds = {f"c{j}": (-8.0, 8.0) for j in range(columns)}
model = DPExplainableBoostingClassifier(epsilon=1.0, delta=1.0 / rows**2, privacy_bounds=bounds, n_jobs=1,
                                        feature_names=list(bounds), random_state=0)
cpu = time.process_time()
model.fit(X, y)
cpu = time.process_time() - cpu
print(f"{cpu:.1f},{model.score(X[:20000], y[:20000]):.4f}")
"""


def _ebm(python: str, rows: int, columns: int) -> dict[str, str]:
    """DP-EBM on the same table, by an interpreter that has interpret-core."""
    done = subprocess.run([python, "-c", _EBM, str(rows), str(columns)], stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(("ebm_cpu_s", "ebm_accuracy"), done.stdout.strip().split(","), strict=True))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="125000,500000,2000000")
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--others", action="store_true", help="HistGradientBoosting (not private) on the same table")
    parser.add_argument("--ebm", help="python with interpret-core: DP-EBM on the same table, its ranges public")
    parser.add_argument("--out", type=Path, default=Path("results/estimators/rows.csv"))
    parser.add_argument("--one", type=int, help="internal: run this size here")
    parser.add_argument("--append", action="store_true", help="add to the file instead of writing it anew")
    arguments = parser.parse_args()
    if arguments.one:
        writer = csv.writer(sys.stdout)
        result = one(arguments.one, arguments.columns, arguments.others, arguments.ebm)
        writer.writerow(result.keys())
        writer.writerow(result.values())
        return
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    add = arguments.append and arguments.out.exists()
    with arguments.out.open("a" if add else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
        if not add:
            writer.writeheader()
        for rows in arguments.rows.split(","):
            command = [sys.executable, __file__, "--one", rows, "--columns", str(arguments.columns)]
            command += ["--others"] if arguments.others else []
            command += ["--ebm", arguments.ebm] if arguments.ebm else []
            done = subprocess.run(command, env={**os.environ, **threads}, stdout=subprocess.PIPE, text=True, check=True)
            for result in csv.DictReader(done.stdout.splitlines()):
                print(result, file=sys.stderr)
                writer.writerow(result)
            file.flush()


if __name__ == "__main__":
    main()
