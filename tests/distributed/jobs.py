"""What groups of processes do in the tests of this folder; every function runs on every rank."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks_kit import Failed, Private, mlp, private, table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import weightclip as wc
from weightclip.audit import hostile_neighbours, run_law, step_law, subjects
from weightclip.errors import UncountedReleases
from weightclip.noise import Streams

EXACT = {"max_physical_batch_size": 8, "exact_sums": True}


def rank() -> int:
    return dist.get_rank()


def dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


class Shaken(Dataset):
    """Records that draw random numbers when they are read."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = table()
        return x[index] + 0.1 * torch.randn(6), y[index]


SETTINGS: dict[str, dict[str, Any]] = {
    "joint cap": {"momentum": 0.9},
    "strict": {"strict": True},
    "certified": {"bounds": wc.Bounds(weight_norm=1.0, input_radius=1.0)},
    "adaptive": {"bounds": wc.Bounds(layer_cap=1.0, adaptive=wc.Adaptive(noise=3.0))},
    "dropout": {"model": dropout},
    "convolution": {"model": conv, "bounds": wc.Bounds(layer_cap=0.5, bias_scale=0.3)},
    "near-empty draws": {"batch": 1},
    "records that draw": {"data": Shaken()},
}


def whole_runs(names: list[str], steps: int = 3) -> dict[str, list[Tensor]]:
    """Weights after noisy seeded runs with integer sums."""
    found = {}
    for name in names:
        settings = dict(SETTINGS[name])
        model = settings.pop("model", mlp)()
        found[name] = private(model, **settings, **EXACT).train(steps).weights()
    return found


def secure_run() -> tuple[list[Tensor], dict[str, Any], int]:
    run = private(seed=None).train(3)
    return run.weights(), run.engine.report(1e-5), run.loader.pieces


def noiseless(settings: dict[str, Any]) -> tuple[list[Tensor], list[float], list[float]]:
    """The sum of one release, with sensitivities and the slack for rounding in them."""
    run = private(sigma=0.0, lr=0.0, **settings).train(1)
    release = run.engine.training.release
    sums = [p.grad.double() * run.engine.expected_batch_size for p in run.model.parameters()]
    return sums, run.engine.training.sensitivity.values.tolist(), release.slack


def drawn(settings: dict[str, Any], draws: int) -> list[tuple[list[list[float]], int, bool]]:
    """Per physical batch: the first feature of its records, its draw, and whether the draw ends with it."""
    seen: list[Any] = []
    run = private(**settings)
    run.loader._on_batch, run.loader._number = seen.append, None  # draw after draw, without a release
    found = []
    while seen == [] or len({info.draw for info in seen}) <= draws:
        for x, _ in run.loader:
            info = seen[-1]
            real = x if info.mask is None else x[info.mask]
            found.append((real[:, 0].tolist(), info.draw, info.last))
    return [entry for entry in found if entry[1] < draws]


def laws(steps: int) -> tuple[Any, ...]:
    """The exact law of one step and the law of runs, by the audits as they are."""
    subject = subjects()["radii on both factors"]
    loudest = torch.full((1, 4), 50.0), torch.tensor([0])
    pairs = hostile_neighbours(subject, loudest)
    step = step_law(subject, pairs)
    whole = run_law(subject, loudest, steps=steps)
    sampled = run_law(replace(subject, rate=0.25), loudest, steps=steps, resume=False)
    return step.violation, step.worst.shift, whole.failures, whole.noise.scale, sampled.failures, sampled.sampling


def attempt(act: Any) -> Failed | None:
    try:
        act()
    except Exception as error:
        return Failed(type(error).__name__, str(error))
    return None


def disagreements() -> dict[str, Failed | None]:
    """Ways in which one rank is different, each with a run of its own."""
    odd, ones = rank() == 1, torch.ones(1, 6)
    found = {
        "sigma": attempt(lambda: private(sigma=2.0 if odd else 1.0)),
        "seed": attempt(lambda: private(seed=rank())),
        "no seed": attempt(lambda: private(seed=None if odd else 0)),
        "model": attempt(lambda: private(nn.Linear(6, 3) if odd else mlp())),
        "bounds": attempt(lambda: private(bounds=wc.Bounds(joint_cap=2.0 if odd else 1.0))),
        "length": attempt(lambda: private(data=table(49 if odd else 48), sample_rate=0.25)),
        "one record": attempt(
            lambda: private(data=(table()[0].index_add(0, torch.tensor([20]), odd * ones), table()[1]))
        ),
        "shards": attempt(lambda: private(data=tuple(t[rank() :: 2] for t in table(96)))),
    }

    def tampered() -> None:
        run = private().train(1)
        if odd:
            with torch.no_grad():
                run.model[0].bias[0] += 1e-6
        run.train(2)

    def ahead() -> None:
        run = private().train(1)
        run.engine.steps += odd
        run.train(3)

    def another_rate() -> None:
        private(lr=0.5 if odd else 0.1).train(2)

    return {**found, "weights": attempt(tampered), "step": attempt(ahead), "learning rate": attempt(another_rate)}


def other_initial_weights() -> list[Tensor]:
    return private(mlp(seed=rank())).weights()


def largest_sensitivities() -> tuple[float, float]:
    """Noise of a rank 0 whose sensitivities are smaller than rank 1's: (its spread, the larger sensitivity)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 3))
    run = private(model, lr=0.0, bounds=wc.Bounds(layer_cap=1.0))
    found = run.engine.training.sensitivity
    update = found.update

    def larger(*args: Any) -> None:
        update(*args)
        found.values = found.values * (1.0 + rank())

    found.update = larger
    run.train(1)
    noise = run.model[0].weight.grad * run.engine.expected_batch_size
    return float(noise.std()), float(found.values[0])


# -- ledger, checkpoints -----------------------------------------------------------------------------------------------


def charged(folder: str, steps: int) -> tuple[int, int, float, dict[str, Any], list[Tensor]]:
    """A run on a ledger: (charges told, steps, epsilon, state, weights)."""
    run = private(seed=None, ledger=Path(folder) / "run.ledger")
    run.train(run.engine.steps + steps)
    ledger, epsilon = run.engine.ledger, run.engine.get_epsilon(1e-5)
    result = ledger.charges, run.engine.steps, epsilon, ledger.state(), run.weights()
    run.engine.detach()
    return result


def held(folder: str) -> tuple[Failed | None, Failed | None]:
    """A second engine on a ledger that is in use; a ledger asked on a rank that has no file."""
    first = private(seed=None, ledger=Path(folder) / "run.ledger")
    second = attempt(lambda: private(seed=None, ledger=Path(folder) / "run.ledger"))
    asked = attempt(lambda: first.engine.ledger.knows("x"))
    first.engine.detach()
    return second, asked


def within_a_budget(folder: str) -> tuple[int, float, float]:
    """make_private_with_epsilon on the ledger: (releases, epsilon, sigma)."""
    model, engine = mlp(), wc.PrivacyEngine("rdp", ledger=Path(folder) / "run.ledger")
    data = DataLoader(TensorDataset(*table()), batch_size=12)
    parts = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data, target_epsilon=6.0,
        target_delta=1e-5, epochs=2, criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the budget is spent
        run = Private(engine, *parts)
        for _ in range(3):
            for x, y in run.loader:
                run.criterion(run.model(x), y).backward()
                run.optimizer.step()
    engine.detach()
    return engine.steps, engine.get_epsilon(1e-5), engine.noise_multiplier


def endless(folder: str) -> None:
    """Trains until it is killed; writes down every charge that was applied, and the key of every noise."""
    place, number = Path(folder), rank()
    _note(place / "began", number, b"")
    keyed = Streams.for_release

    def watched(self: Streams, charge: int, content: Any) -> Streams:
        found = keyed(self, charge, content)
        _note(place / "noise", charge, found.key("which"))
        return found

    Streams.for_release = watched
    run = private(seed=None, ledger=place / "run.ledger")
    if (place / "saved" / "ledger.json").exists():
        run.engine.load(place / "saved")
    while True:
        before = run.weights()
        run.train(run.engine.steps + 1)
        moved = torch.cat([(a - b).flatten() for a, b in zip(before, run.weights(), strict=True)])
        _note(place / f"applied-{number}", run.engine.steps - 1, hashlib.sha256(moved.numpy()).digest())
        if run.engine.steps % 3 == 0:
            run.engine.save(place / "saved")


def _note(path: Path, charge: int, digest: bytes) -> None:
    """One line in one write: a kill leaves it whole, or not there at all."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, f"{charge} {digest.hex()}\n".encode())
    os.close(handle)


def saved(folder: str, steps: int, seed: int | None = 0) -> list[Tensor]:
    run = private(seed=seed, momentum=0.9, **EXACT).train(steps)
    run.engine.save(Path(folder) / "saved" if rank() == 0 else Path(folder) / "nobody")
    dist.barrier()
    return run.weights()


def resumed(folder: str, steps: int, exact: bool, seed: int | None = 0) -> tuple[list[Tensor], int, list[bool]]:
    run = private(mlp(seed=5), seed=seed, momentum=0.9, **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncountedReleases)
        # only rank 0 has the folder
        run.engine.load(Path(folder) / "saved" if rank() == 0 else Path(folder) / "nobody", exact=exact)
    run.train(run.engine.steps + steps)
    return run.weights(), run.engine.steps, [Path(folder, "nobody").exists()]


def without_a_checkpoint(folder: str) -> Failed | None:
    run = private()
    return attempt(lambda: run.engine.load(Path(folder) / "nothing"))


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusals() -> dict[str, Failed | None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = TensorDataset(*table())

    def sampler() -> None:
        model, engine = mlp(), wc.PrivacyEngine("rdp")
        loader = DataLoader(data, batch_size=12, sampler=DistributedSampler(data))
        engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
            criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0,
        )  # fmt: skip

    norm = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    return {
        "wrapped": attempt(lambda: private(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")))),
        "tensor": attempt(lambda: private(parallelize_module(mlp(), mesh, {"0": ColwiseParallel()}))),
        "sequence": attempt(lambda: private(parallelize_module(norm, mesh, {"1": SequenceParallel()}))),
        "ddp": attempt(lambda: private(DistributedDataParallel(mlp()))),
        "sampler": attempt(sampler),
    }


def estimator() -> Failed | None:
    x, y = table()
    return attempt(lambda: wc.LipDPClassifier(epsilon=1.0, delta=1e-5).fit(x.numpy(), y.numpy()))


def wrapped_afterwards() -> Failed | None:
    from torch.nn.parallel import DistributedDataParallel

    run = private()
    return attempt(lambda: Private(run.engine, DistributedDataParallel(run.model), *_rest(run)).train(1))


def _rest(run: Private) -> tuple[Any, ...]:
    return run.optimizer, run.loader, run.criterion


def other_calls(folder: str) -> tuple[Failed | None, list[Tensor]]:
    """Rank 1 loads a checkpoint while the others make a step."""
    run = private(momentum=0.9, **EXACT).train(1)
    run.engine.save(Path(folder) / "saved")
    dist.barrier()
    act = (lambda: run.engine.load(Path(folder) / "saved")) if rank() == 1 else (lambda: run.train(2))
    return attempt(act), run.weights()


def with_workers() -> list[Tensor]:
    """A run whose records, which draw, are read by worker processes."""
    model, engine = mlp(), wc.PrivacyEngine("rdp")
    loader = DataLoader(Shaken(), batch_size=12, num_workers=1)
    parts = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader, noise_multiplier=1.0,
        criterion=nn.CrossEntropyLoss(), generator=torch.Generator().manual_seed(0), **EXACT,
    )  # fmt: skip
    return Private(engine, *parts).train(2).weights()


def left_alone() -> Failed | None:
    """The group ends while an engine still trains in it."""
    run = private().train(1)
    dist.destroy_process_group()
    return attempt(lambda: run.train(2))
