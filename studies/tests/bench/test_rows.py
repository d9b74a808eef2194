"""Files of rows: steps over Poisson draws and of one size never meet in one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weightclip.errors import WeightclipError
from weightclip_studies.bench import file_of

ROOT = Path(__file__).parents[3]


def test_rows_over_draws_have_a_file_of_their_own(tmp_path: Path) -> None:
    assert (file_of(False).name, file_of(True).name) == ("step.csv", "draws.csv")
    for draws, name in ((False, "mine.csv"), (False, "step.csv"), (True, "draws.csv"), (True, "draws_gpu.csv")):
        assert file_of(draws, tmp_path / name) == tmp_path / name
    for draws, name in ((True, "step.csv"), (True, "mine.csv"), (False, "draws.csv")):
        with pytest.raises(WeightclipError, match=name) as caught:
            file_of(draws, tmp_path / name)
        assert "\n" not in str(caught.value)


def test_the_script_refuses_before_it_measures(tmp_path: Path) -> None:
    """Rows of one batch size in the file stay what they were."""
    there = tmp_path / "step.csv"
    there.write_text("kept")
    call = [sys.executable, "studies/benchmarks/step.py", "--models", "mlp", "--draws", "--append", "--out", str(there)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("step.py: error: rows of steps over")
    assert there.read_text() == "kept"
