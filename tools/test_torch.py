"""The core tests with another release of torch, in a virtual environment of its own (``.venv-torch-x.y``).

``python tools/test_torch.py 2.11`` (or ``minimum``, ``newest``). The environment is built once, and anew when
pyproject.toml is newer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv

from releases import ROOT, only_argument

# what meets torch's edges: graphs and certificates, layers, engine, sampling, checkpoints, estimators, text that runs
CORE = [
    "README.md", "tests/test_torch_private.py", "tests/test_names.py", "tests/test_tutorials.py",
    "tests/bounds/test_layer_norms.py", "tests/certificate/test_*.py", "tests/losses/test_custom.py",
    "tests/nn/test_averaging.py", "tests/factors/test_*.py", "tests/engine/test_engine*.py",
    "tests/engine/test_caps.py", "tests/engine/test_transformer.py", "tests/engine/test_layers_refused.py",
    "tests/noise/test_release.py", "tests/test_device.py", "tests/sampling/test_*.py",
    "tests/engine/test_checkpoint.py", "tests/tabular/test_estimators.py", "tests/engine/test_holes.py",
    "tests/engine/test_any_loss.py", "tests/accounting/test_ledger.py",
]  # fmt: skip
NEEDED = ["pytest>=8", "hypothesis>=6.100", "opacus>=1.5"]


def core() -> list[str]:
    """The test files; a pattern that finds none is an error, so that a renamed file is not lost."""
    found = {pattern: sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)) for pattern in CORE}
    if lost := [pattern for pattern, files in found.items() if not files]:
        sys.exit(f"tools/test_torch.py: no such tests: {', '.join(lost)}")
    return [name for files in found.values() for name in files]


def environment(release: str) -> str:
    """The Python of an environment with that torch, built if it is missing or old."""
    home = ROOT / f".venv-torch-{release}"
    python, stamp, wanted = home / "bin" / "python", home / ".installed", ROOT / "pyproject.toml"
    if not stamp.exists() or stamp.stat().st_mtime < wanted.stat().st_mtime:
        print(f"building {home.name} (a few minutes, and several GB where pip finds CUDA builds only)", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        packages = [f"torch=={release}.*", *NEEDED, "-e", ".[table,onnx]"]
        subprocess.run([*pip, "install", "-qq", "--no-compile", *packages], cwd=ROOT, check=True)
        # the names that the docs use are looked up; what the studies need besides is not
        subprocess.run([*pip, "install", "-qq", "--no-compile", "--no-deps", "-e", "studies"], cwd=ROOT, check=True)
        stamp.touch()
    return str(python)


def main() -> None:
    """Build, then test."""
    release = only_argument("usage: python tools/test_torch.py x.y|minimum|newest")
    began = time.perf_counter()
    python = environment(release)
    built = time.perf_counter()
    # one thread, as in `make test`; no PYTHONPATH, which could put other sources in front
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    settings.pop("PYTHONPATH", None)
    say = "import torch, weightclip as wc; print('torch', torch.__version__, 'weightclip', wc.__version__, flush=True)"
    subprocess.run([python, "-c", say], cwd=ROOT, env=settings, check=True)
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *core()]
    code = subprocess.run(tests, cwd=ROOT, env=settings).returncode
    ended = time.perf_counter()
    print(f"torch {release}: environment {built - began:.0f} s, tests {ended - built:.0f} s, exit code {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()
