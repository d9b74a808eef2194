"""The script of the image jobs on a lent GPU: jobs in the background, a wait that ends with them, what comes home."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = "studies/benchmarks/images_gpu.sh"
FAKE = """#!/bin/sh
case "$*" in *need.py*) exit 0 ;; esac
echo "$@" >> "$CALLS"
case "$*" in
*"extractor train"*)
    mkdir -p "$WORK/extractor" "$WORK/extractor-work/snapshot"
    echo early > "$WORK/extractor/resnet9-64-seed0.png"
    echo half > "$WORK/extractor-work/snapshot/resnet9-64-seed0.json"
    sleep "$TRAINING"
    [ "$TRAINING" = 0 ] && exit 1
    echo whole > "$WORK/extractor/resnet9-64-seed0.json" ;;
*"extractor heads"*) cat "$WORK/extractor/resnet9-64-seed0.json" >> "$WORK/heads/cifar10.jsonl" ;;
esac
"""


class Machine:
    """The script in a folder of its own, with a Python that only pretends."""

    def __init__(self, folder: Path, training: float) -> None:
        self.work, self.out, self.calls = folder / "work", folder / "out", folder / "calls"
        (folder / "bin").mkdir()
        for name, text in (("python3", FAKE), ("nvidia-smi", "#!/bin/sh\n")):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.calls.write_text("")
        self.env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "WORK": str(self.work),
                    "OUT": str(self.out), "CALLS": str(self.calls), "TRAINING": str(training)}  # fmt: skip
        (self.work / "tree" / "studies").mkdir(parents=True)
        shutil.copytree(ROOT / "studies" / "benchmarks", self.work / "tree" / "studies" / "benchmarks")
        (self.work / "tree" / "results" / "images").mkdir(parents=True)
        shutil.copy(ROOT / "results" / "images" / "noise.json", self.work / "tree" / "results" / "images")

    def run(self, *words: str) -> str:
        """What one call prints."""
        call = ["sh", SCRIPT, *words]
        return subprocess.run(call, cwd=ROOT, env=self.env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("training", "used"), [(5, "whole"), (0, "half")])
def test_heads_wait_for_the_extractor_or_take_what_a_failed_training_left(tmp_path, training: float, used: str) -> None:
    machine = Machine(tmp_path, training)
    machine.run("start", "train", "--minutes", "5")
    machine.run("start", "heads", "--datasets", "cifar10")
    if training:
        machine.run("look")  # the machine may go away now
        assert (machine.out / "snapshot" / "resnet9-64-seed0.json").read_text() == "half\n"
    began = time.monotonic()
    machine.run("wait", "30")
    assert time.monotonic() - began < 25  # it ends with the jobs
    with tarfile.open(machine.out / "results.tar.gz") as kept:
        rows, table = kept.extractfile("cifar10.jsonl"), kept.extractfile("noise.json")
        assert rows is not None and table is not None and rows.read().decode() == 3 * f"{used}\n"
    assert (machine.out / "resnet9-64-seed0.json").read_text() == f"{used}\n" and (machine.out / "rows.tar.gz").exists()
    train, private, rest, learned = machine.calls.read_text().splitlines()
    assert train.endswith("--minutes 5") and private.endswith("--methods lip-weights --datasets cifar10")
    assert rest.endswith("--features joined --methods dp-sgd,non-private --datasets cifar10")
    assert learned.endswith("--features learned --methods lip-weights,non-private --datasets cifar10")
    assert not list(machine.work.glob("*.pid"))


def test_a_wait_ends_in_time(tmp_path) -> None:
    machine = Machine(tmp_path, 5)
    machine.run("start", "train")
    began = time.monotonic()
    machine.run("wait", "1")
    assert time.monotonic() - began < 5 and (machine.work / "train.pid").exists()
    machine.run("wait", "30")
