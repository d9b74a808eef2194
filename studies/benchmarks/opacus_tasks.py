"""Six tasks beside Opacus: accuracy, time and memory at one epsilon, every setting the same.

Both libraries train the same model from the same initial weights with the same optimiser, batch, epochs and noise
multiplier (calibrated once, by PLD) and clip each record's whole gradient at 1. Opacus runs in two ways: with its
hooks, which keep per-sample gradients, and with ghost clipping. Every run is a process of its own on one core, so that
its peak of memory is its own; a run that is in the file already is left out.

    python studies/benchmarks/opacus_tasks.py --out results/method/opacus_tasks.csv
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from defaults import DELTA, EPSILON, TASKS, Data, text_folder  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.accounting import calibrate_sigma

METHODS = ("weightclip", "Opacus", "Opacus ghost")
WORDS, LENGTH = 2000, 24
COLUMNS = ("task", "method", "seed", "epsilon", "delta", "steps", "accuracy", "ms_per_step", "extra_mib")


@dataclass(frozen=True)
class Task:
    """A model and what it is trained with; ``timed``: only time and memory are asked for."""

    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    epochs: int
    batch: int
    rate: float
    timed: bool = False


class Sentences(nn.Module):
    """A tiny BERT (two layers of width 64) that has seen public sentences; LoRA trains four products, and a head."""

    def __init__(self) -> None:
        super().__init__()
        import peft
        import transformers

        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        config.num_labels = 2
        body = transformers.BertForSequenceClassification(config)
        _see_public_sentences(body)
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["query", "value"])
        self.bert = peft.get_peft_model(body, lora)

    def forward(self, ids: Tensor) -> Tensor:
        """(records, words) to logits; the mask follows from the padding."""
        return self.bert(input_ids=ids, attention_mask=(ids != 0).long()).logits


def _sentences(name: str, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Sentences of SST-2 as hashed words, cut or padded to a public length, and their labels."""

    def ids(sentence: str) -> list[int]:
        found = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in sentence.lower().split()[:LENGTH]]
        return found + [0] * (LENGTH - len(found))

    with gzip.open(text_folder() / f"{name}.tsv.gz", "rt") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[first:last]
    return torch.tensor([ids(row["sentence"]) for row in rows]), torch.tensor([int(row["label"]) for row in rows])


def _see_public_sentences(body: Any) -> None:
    """Ordinary training on sentences that stand for public ones: half as many as the private ones, none in common."""
    x, y = _sentences("train", 20_000, 30_000)
    optimizer = torch.optim.Adam(body.parameters(), 1e-3)
    for rows in [r for _ in range(2) for r in torch.randperm(len(x)).split(256)]:
        optimizer.zero_grad()
        body(input_ids=x[rows], attention_mask=(x[rows] != 0).long(), labels=y[rows]).loss.backward()
        optimizer.step()


def words() -> Data:
    """The private sentences, and test sentences."""
    return *_sentences("train", 0, 20_000), *_sentences("test", 0, 20_000)


def pictures() -> Data:
    """Random pictures, for time and memory alone."""
    x, y = torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,))
    return x, y, x, y


def _resnet() -> nn.Module:
    from weightclip_studies.bench import models

    return models()["resnet18"].factory()


def _known(name: str) -> Task:
    task = TASKS[name]
    return Task(task.model, task.data, task.epochs, task.batch, task.rate)


ALL = {
    "Adult MLP": _known("Adult MLP"),
    "digits CNN": _known("digits CNN"),
    "text features": _known("text features"),
    "digits transformer": _known("digits transformer"),
    "BERT with LoRA": Task(Sentences, words, 2, 512, 5e-3),
    "ResNet-18 step": Task(_resnet, pictures, 1, 16, 1e-3, timed=True),
}


def private(method: str, model: nn.Module, optimizer: Any, loader: Any, sigma: float) -> tuple[Any, Any, Any, Any]:
    """(model, optimiser, loader, criterion) of one of the libraries."""
    parts = {"module": model, "optimizer": optimizer, "data_loader": loader, "noise_multiplier": sigma}
    criterion = nn.CrossEntropyLoss()
    if method == "weightclip":
        q = 1 / len(loader)  # Opacus' rate and divisor
        return wc.PrivacyEngine().make_private(
            **parts, criterion=criterion, bounds=wc.Bounds(max_grad_norm=1.0), sample_rate=q,
            expected_batch_size=int(q * len(loader.dataset)),
        )  # fmt: skip
    from opacus import PrivacyEngine

    engine: Any = PrivacyEngine()  # what it returns depends on its arguments
    if method == "Opacus":
        return *engine.make_private(**parts, max_grad_norm=1.0)[:3], criterion
    model, optimizer, criterion, loader = engine.make_private(
        **parts, max_grad_norm=1.0, criterion=criterion, grad_sample_mode="ghost"
    )
    return model, optimizer, loader, criterion


def run(name: str, method: str, seed: int) -> dict[str, Any]:
    """One training; its row."""
    task = ALL[name]
    torch.manual_seed(0)
    x, y, test_x, test_y = task.data()
    torch.manual_seed(seed)
    model = task.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    loader = DataLoader(TensorDataset(x, y), batch_size=task.batch)
    sigma = calibrate_sigma(EPSILON, DELTA, 1 / len(loader), task.epochs * len(loader))
    before = peak(begin=True)
    model, optimizer, loader, criterion = private(method, model, torch.optim.Adam(trained, task.rate), loader, sigma)
    model.train()
    seconds, done = 0.0, 0
    for _ in range(task.epochs):
        for a, b in loader:
            if not len(a):  # an empty draw, which Opacus hands out without records
                continue
            began = time.process_time()
            optimizer.zero_grad()
            criterion(model(a), b).backward()
            optimizer.step()
            seconds, done = seconds + (time.process_time() - began) * (done > 0), done + 1  # the first one warms up
    extra = peak() - before
    model.eval()
    with torch.no_grad():
        accuracy = float((model(test_x).argmax(1) == test_y).double().mean()) if not task.timed else float("nan")
    return {
        "task": name, "method": method, "seed": seed, "epsilon": EPSILON, "delta": DELTA, "steps": done,
        "accuracy": round(accuracy, 4), "ms_per_step": round(1e3 * seconds / max(1, done - 1), 2),
        "extra_mib": round(extra, 1),
    }  # fmt: skip


def peak(begin: bool = False) -> float:
    """The largest memory of this process, MiB, since a call with ``begin`` (Linux)."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    """Run what is missing, a process for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(ALL), choices=list(ALL))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/method/opacus_tasks.csv"))
    parser.add_argument("--one", nargs=3, metavar=("TASK", "METHOD", "SEED"), help="one run, its row as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.one:
        print(json.dumps(run(options.one[0], options.one[1], int(options.one[2]))))
        return
    done = set()
    if options.out.exists():
        with options.out.open() as file:
            done = {(row["task"], row["method"], int(row["seed"])) for row in csv.DictReader(file)}
    for key in [(t, m, s) for s in range(options.seeds) for t in options.tasks for m in options.methods]:
        if key in done:
            continue
        child = [sys.executable, __file__, "--one", *map(str, key)]
        found = subprocess.run(child, capture_output=True, text=True)
        if found.returncode:
            print(*key, "failed:", found.stderr.strip().splitlines()[-1], flush=True)
            continue
        row = json.loads(found.stdout.strip().splitlines()[-1])
        print(*row.values(), flush=True)
        fresh = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if fresh:
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
