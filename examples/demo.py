"""Train a private income classifier on the bundled Adult data and show what it cost (run with ``make demo``)."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader, TensorDataset

import adult
import weightclip as wc


def main() -> None:
    """Load, train, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=1.0, help="total privacy budget (default 1.0)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (default 12)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the picture (default runs/demo)")
    options = parser.parse_args()
    console = Console()
    torch.set_num_threads(1)  # a network this small gains nothing from more, and loses much where cores are shared

    table, income = adult.load()
    X = torch.tensor(adult.encode(table))  # public ranges and categories: nothing is fitted on private rows
    y = torch.tensor(income == ">50K").long()
    train, test = map(torch.as_tensor, adult.parts(len(y)))
    delta = 1e-6
    share = y[test].double().mean().item()
    console.print(
        f"Adult: {len(train)} training records, {X.shape[1]} features; income > 50K in {share:.1%} of the test set"
    )

    torch.manual_seed(0)
    model = wc.models.MLP(X.shape[1], hidden=(16,), out_features=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(X[train], y[train]), batch_size=1024)
    engine = wc.PrivacyEngine()
    began = time.time()
    model, optimizer, loader, loss = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader,
        criterion=wc.losses.CrossEntropy(cap=0.3),
        target_epsilon=options.epsilon, target_delta=delta, epochs=options.epochs,
        bounds=wc.Bounds(input_radius=3.0, layer_radius=3.0, cotangent_radius=0.3, bias_scale=0.5),
        allocation=wc.AdamAware(),
    )  # fmt: skip
    average = wc.nn.ParameterAverage(model, decay=0.95)
    accuracies, epsilons = [], []
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("private training", total=options.epochs * len(loader))
        for _ in range(options.epochs):
            for x, target in loader:
                optimizer.zero_grad()
                loss(model(x), target).backward()
                optimizer.step()
                average.update()
                progress.advance(task)
            # test records are not part of the training data: looking at them costs no privacy here
            with torch.no_grad(), average.apply():
                accuracies.append((model(X[test]).argmax(1) == y[test]).double().mean().item())
            epsilons.append(engine.get_epsilon(delta))
    seconds = time.time() - began

    console.print(str(engine.certificate()), highlight=False)
    console.print(
        f"\naccuracy [bold]{accuracies[-1]:.4f}[/] (majority {1 - y[test].double().mean():.4f})   "
        f"epsilon [bold]{epsilons[-1]:.3f}[/]   delta {delta:g}   {seconds:.1f} s"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "training.png"
    draw(accuracies, epsilons, 1 - y[test].double().mean().item(), picture)
    console.print(f"picture: {picture}")


def draw(accuracies: list[float], epsilons: list[float], majority: float, path: Path) -> None:
    """Accuracy and epsilon over training."""
    epochs = range(1, len(accuracies) + 1)
    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    left.plot(epochs, accuracies, "o-", color="#1f6f8b", label="test accuracy")
    left.axhline(majority, color="#999999", linestyle=":", label="majority class")
    left.set_xlabel("epoch")
    left.set_ylabel("test accuracy")
    right = left.twinx()
    right.plot(epochs, epsilons, "s--", color="#c8553d", label="ε spent")
    right.set_ylabel("ε spent")
    right.set_ylim(bottom=0)
    left.legend(handles=[*left.get_lines(), *right.get_lines()], loc="center right", frameon=False)
    left.set_title("Adult: private training")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
