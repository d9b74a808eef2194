"""A loop that counts its iterations learns nothing about a draw (SOUNDNESS section 9)."""

from __future__ import annotations

import torch
from tests.engine_kit import mlp, private, table
from torch import nn

import weightclip as wc


def schedule(n: int, seed: int, physical: int = 16, q: float = 0.5, b: int = 16) -> list[float]:
    """Learning rates at the end of each release, where the loop calls scheduler.step() on every iteration."""
    run = private(nn.Linear(6, 3), table(n), sigma=1.0, batch=b, sample_rate=q, seed=seed,
                  max_physical_batch_size=physical)  # fmt: skip
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    rates = []
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        scheduler.step()
        rates.append(run.optimizer.param_groups[0]["lr"])
    assert run.engine.steps == len(run.loader)
    return rates


def a_scheduler_of_iterations_does_not_see_the_draw() -> None:
    seen = {tuple(schedule(n, seed)) for n in (30, 31, 32, 33) for seed in range(8)}
    assert len(seen) == 1


def test_a_scheduler_of_iterations_does_not_see_the_draw() -> None:
    a_scheduler_of_iterations_does_not_see_the_draw()


def test_an_average_of_iterations_does_not_see_the_draw() -> None:
    counts = set()
    for seed in range(8):
        run = private(mlp(), table(40), sigma=1.0, batch=10, sample_rate=0.25, seed=seed, max_physical_batch_size=9)
        average = torch.optim.swa_utils.AveragedModel(run.model)
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            average.update_parameters(run.model)
        counts.add(int(average.n_averaged))
    assert counts == {len(run.loader) * run.loader.pieces}


def test_the_last_piece_releases_also_where_it_is_empty() -> None:
    run = private(mlp(), table(40), batch=10, sample_rate=0.25, max_physical_batch_size=5)
    moved = []
    for x, y in run.loader:
        before = run.weights()
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        moved.append(any(not torch.equal(before[k], v) for k, v in run.weights().items()))
    assert run.engine.steps == len(run.loader) == 4
    assert moved == ([False] * (run.loader.pieces - 1) + [True]) * 4


def test_with_every_record_drawn_their_number_is_declared_public() -> None:
    run = private(mlp(), table(17), sample_rate=1.0, batch=17, max_physical_batch_size=16)
    assert [len(x) for x, _ in run.loader] == [16, 1] and run.loader.pieces == 2
    assert "declared public" in (wc.sampling.PoissonLoader.__doc__ or "")
