"""The walk of docs/walk.md with a clock: ``python tools/walk.py`` does in fresh processes what a new user would.

Each station is a page of the documentation, run as it stands, or the commands it shows. Prints a table.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
_ROWS = """
import random
pick = random.Random(0)
with open("data.csv", "w") as file:
    file.write("age,hours,sector,income\\n")
    for _ in range(5000):
        age, hours, sector = pick.randint(17, 90), pick.randint(1, 99), pick.choice(["public", "private", "own"])
        likely = 0.05 + 0.5 * (35 < age < 65) + 0.4 * (hours > 45)
        file.write(f"{age},{hours},{sector},{'high' if pick.random() < likely else 'low'}\\n")
"""
_TRAINING = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import weightclip as wc

torch.manual_seed(0)
X = torch.randn(400, 8)
data = TensorDataset(X, (X[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
engine = wc.PrivacyEngine(ledger="run.ledger")
model, optimizer, loader, loss = engine.make_private_with_epsilon(
    module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), criterion=nn.CrossEntropyLoss(),
    data_loader=DataLoader(data, batch_size=40), target_epsilon=2.0, target_delta=1e-5, epochs=20)
if len(sys.argv) > 1:
    engine.load("checkpoint")
    print("resumed at step", engine.steps, flush=True)
while engine.steps_left():
    for x, y in loader:
        optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step()
        if engine.steps == 20:
            engine.save("checkpoint")
        if len(sys.argv) == 1 and engine.steps > 30:
            print("waiting to be killed", flush=True); time.sleep(600)
        if not engine.steps_left():
            break
print(f"done: epsilon {engine.get_epsilon(1e-5):.3f} after {engine.steps} steps")
"""


def page(name: str) -> Callable[[Path], None]:
    """Runs the Python of a page in a fresh process."""

    def go(folder: Path) -> None:
        code = "\n".join(_FENCE.findall((ROOT / "docs" / f"{name}.md").read_text()))
        python(folder, f"{name}.py", code)

    return go


def python(folder: Path, name: str, code: str) -> None:
    (folder / name).write_text(code)
    subprocess.run([sys.executable, name], cwd=folder, check=True)


def weightclip(folder: Path, line: str) -> None:
    """What a user types after ``weightclip``."""
    command = [sys.executable, "-c", "from weightclip.cli import main; main()", *line.split()]
    subprocess.run(command, cwd=folder, check=True)


def table(folder: Path) -> None:
    """A CSV from the shell: train, check, predict."""
    python(folder, "rows.py", _ROWS)
    for line in ("train data.csv --target income --epsilon 1 --out model", "verify model",
                 "predict model data.csv --out predictions.csv"):  # fmt: skip
        weightclip(folder, line)


def killed(folder: Path) -> None:
    """A run that is killed, and goes on within its budget."""
    (folder / "training.py").write_text(_TRAINING)
    first = subprocess.Popen([sys.executable, "training.py"], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and "waiting" in first.stdout.readline()
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    subprocess.run([sys.executable, "training.py", "again"], cwd=folder, check=True)
    weightclip(folder, "verify run.ledger --delta 1e-5")


STATIONS: dict[str, Callable[[Path], None]] = {
    "a private MLP": page("start"),
    "a private ResNet (and a linear head, and a CNN)": page("vision"),
    "LoRA on an encoder": page("lora"),
    "a CSV from the shell": table,
    "resume after a kill": killed,
    "audit of one's own model, and of any trainer": page("auditing"),
    "report, card, verification": page("sharing"),
}


def main() -> None:
    """Walk."""
    lines = []
    for name, go in STATIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            began, spent = time.perf_counter(), os.times()
            go(Path(folder))
            after = os.times()
            cpu = after.children_user + after.children_system - spent.children_user - spent.children_system
            lines.append(f"| {name} | {time.perf_counter() - began:.0f} s | {cpu:.0f} s |")
            print(lines[-1], flush=True)
    print("\n| station | clock | CPU |\n|---|---|---|\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
