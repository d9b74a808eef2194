"""``weightclip train`` killed at random moments: no table data stays behind, and the model folder is whole or absent.

Four kills run always, fifty with WEIGHTCLIP_FULL=1.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.hostile.kit import SECRET, contents

from weightclip.tabular import folder as _folder
from weightclip.tabular._model import Model

KILLS = 50 if os.environ.get("WEIGHTCLIP_FULL") == "1" else 4
NUMBER = 4711.0815  # in every record: as text, or as the eight bytes of a raw value
MARKS = (SECRET.encode(), b"4711.0815", struct.pack("<d", NUMBER))

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


class Zygote:
    def __init__(self, scratch: Path) -> None:
        start = [sys.executable, str(Path(__file__).with_name("zygote.py"))]
        quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TMPDIR": str(scratch)}
        self.process = subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, **quiet})  # fmt: skip

    def order(self, arguments: list[str], sent: str = "", delay: float = 0.0) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"arguments": arguments, "signal": sent, "delay": delay}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


@pytest.fixture
def zygote(tmp_path):
    (tmp_path / "scratch").mkdir()
    process = Zygote(tmp_path / "scratch")
    yield process
    process.close()


def holds_table(path: Path) -> bool:
    data = path.read_bytes()
    return any(mark in data for mark in MARKS)


def test_the_marks_are_found_where_they_are(tmp_path: Path) -> None:
    np.full(5, NUMBER).tofile(tmp_path / "raw")
    (tmp_path / "text").write_text(f"1,{SECRET}\n")
    (tmp_path / "nothing").write_text("1,2\n")
    assert [holds_table(tmp_path / n) for n in ("raw", "text", "nothing")] == [True, True, False]


def test_kills_leave_no_table_behind_and_no_broken_model(tmp_path: Path, zygote: Zygote) -> None:
    rng = random.Random(int.from_bytes(os.urandom(4), "little"))
    folder, scratch = tmp_path / "case", tmp_path / "scratch"
    folder.mkdir()
    rows = [f"{NUMBER},{SECRET if i % 2 else 'b'},{i % 11 / 10},{'yes' if i % 11 > 5 else 'no'}\n" for i in range(6000)]
    (folder / "data.csv").write_text("a,b,c,label\n" + "".join(rows))
    train = ["train", str(folder / "data.csv"), "--target", "label", "--epsilon", "3", "--delta", "1e-6",
             "--accountant", "rdp", "--epochs", "6", "--out", str(folder / "model")]  # fmt: skip
    whole = zygote.order(train)
    assert whole["status"] == 0
    died = 0
    for kill in range(KILLS):
        fresh = kill % 4 == 3  # every fourth time there is no older model
        name = "new" if fresh else "model"
        # half of the kills fall into the last part, where the folder is written
        delay = whole["seconds"] * (rng.uniform(0.7, 1.02) if kill % 2 else rng.uniform(0.0, 0.7))
        sent = ("SIGKILL", "SIGTERM", "SIGHUP")[kill % 3]
        end = zygote.order([*train[:-1], str(folder / name), "--overwrite"], sent, delay)
        died += end["status"] != 0
        assert contents(scratch) == {}, (sent, delay)
        assert (folder / "model").is_dir() and not (folder / "new" / "data.csv").exists()
        for model in (folder / "model", folder / "new"):
            if model.exists():
                tensors, pipeline, _ = _folder.load(model)
                Model.load(tensors, pipeline)
        left = [p for p in folder.rglob("*") if p.is_file() and p.name != "data.csv"]
        assert not any(holds_table(p) for p in left), (sent, delay)
        strays = [p.name for p in folder.iterdir() if p.name not in ("data.csv", "model", "new")]
        assert sent == "SIGKILL" or not strays, (sent, delay, strays)
        for name in strays:  # half a model of a process that could not clean up: its own weights, no records
            for path in (folder / name).iterdir():
                path.unlink()
            (folder / name).rmdir()
    assert died >= KILLS // 4  # most of them met a living process
