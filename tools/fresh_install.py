"""What a new user gets: the wheel in an empty environment, README's example and one estimator, outside the checkout.

``python tools/fresh_install.py newest`` installs the wheel as ``pip install weightclip`` would; ``minimum`` or ``x.y``
asks for that release of torch beside it. Everything happens in a temporary folder, which is removed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from dist import copy_sources
from releases import ROOT, only_argument

TRIAL = """
import doctest, sys, warnings
from pathlib import Path

import torch
import weightclip as wc

warnings.simplefilter("error")
assert Path(wc.__file__).is_relative_to(sys.prefix), wc.__file__
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
result = doctest.testfile("README.md", module_relative=False, optionflags=flags)
assert result.attempted > 10 and result.failed == 0, result

from sklearn.datasets import make_classification
X, y = make_classification(2000, 8, random_state=0)
estimator = wc.LipDPClassifier(epsilon=3.0, random_state=0).fit(X, y)
print(f"torch {torch.__version__}: README {result.attempted} lines, estimator accuracy {estimator.score(X, y):.3f}")
assert estimator.score(X, y) > 0.7
"""


def main() -> None:
    """Build, install, try."""
    asked = sys.argv[-1]
    release = only_argument("usage: python tools/fresh_install.py x.y|minimum|newest")
    pip = ["-m", "pip", "--disable-pip-version-check"]
    settings = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    times = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        home, source = Path(folder), Path(folder) / "source"
        python = str(home / "venv" / "bin" / "python")
        # built from a copy: setuptools would leave build/ in the checkout, and take from it what an older build left
        copy_sources(source)
        shutil.copy(ROOT / "README.md", home)
        venv.create(home / "venv", with_pip=True)
        subprocess.run([python, *pip, "wheel", "-qq", "--no-deps", "-w", folder, str(source)], env=settings, check=True)
        shutil.rmtree(source)
        (wheel,) = home.glob("*.whl")
        times.append(time.perf_counter())
        pinned = [] if asked == "newest" else [f"torch=={release}.*"]
        subprocess.run([python, *pip, "install", "-qq", "--no-compile", str(wheel), *pinned], env=settings, check=True)
        times.append(time.perf_counter())
        (home / "trial.py").write_text(TRIAL)
        code = subprocess.run([python, "trial.py"], cwd=home, env=settings).returncode
        times.append(time.perf_counter())
    built, installed, tried = (b - a for a, b in zip(times, times[1:], strict=False))
    print(f"torch {release}: wheel {built:.0f} s, install {installed:.0f} s, trial {tried:.0f} s, exit code {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()
