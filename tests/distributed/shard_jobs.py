"""What groups of processes do with sharded models in the tests of this folder."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import jobs
from tests.ranks_kit import Failed, Private, mlp, private, table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

import weightclip as wc
from weightclip._torch import sharded_groups
from weightclip.errors import UncountedReleases
from weightclip.noise import Streams


class Scaled(nn.Module):
    """A parameter outside known layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)) * self.scale)


class Tied(nn.Module):
    """A head that uses the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.embed = nn.MultiheadAttention(6, 2, batch_first=True), nn.Embedding(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        words = self.embed(x)
        return nn.functional.linear((words + self.mix(words, words, words)[0]).mean(1), self.embed.weight)


def words() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randint(0, 9, shape, generator=generator) for shape in ((48, 4), (48,))))


class Frozen(nn.Sequential):
    """Only the last layer is trained, and a buffer is there."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self[0].requires_grad_(False)
        self.register_buffer("public", torch.ones(2))


def parts_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.children() if any(True for _ in m.parameters())]


def shard(model: nn.Module, **settings: Any) -> nn.Module:
    """Every part a group of its own, and the rest with the root: the usual way.

    Around a part with several inputs that need gradients fully_shard changes the order in which autograd adds, and so
    the last bits of what one process has: such a model is one group here.
    """
    for part in [] if isinstance(model, Tied) else parts_of(model)[:-1]:
        fully_shard(part, **settings)
    fully_shard(model, **settings)
    return model


SETTINGS: dict[str, dict[str, Any]] = {
    "joint cap": {"momentum": 0.9},
    "layer caps": {"bounds": wc.Bounds(layer_cap=0.5, bias_scale=0.3)},
    "radii": {"bounds": wc.Bounds(layer_radius=1.0, cotangent_radius=0.5)},
    "adaptive": {"bounds": wc.Bounds(layer_cap=1.0, adaptive=wc.Adaptive(noise=3.0))},
    "dropout": {"model": jobs.dropout},
    "convolution": {"model": jobs.conv},
    "own parameter": {"model": Scaled, "bounds": wc.Bounds(layer_cap=0.5)},
    "tied words": {"model": Tied, "data": words()},
    "frozen": {"model": Frozen},
    "strict": {"strict": True},
    "views": {"augmentation_multiplicity": 1, "release_grid": 1e-3},
}


def weights(run: Private) -> list[Tensor]:
    """Whole weights, on every rank."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for t in map(Tensor.detach, params(run.model))]


def params(model: nn.Module) -> list[Any]:
    for group in sharded_groups(model):
        group.part.reshard()
    return list(model.parameters())


def whole_runs(names: list[str], sharded: bool = True, steps: int = 2) -> dict[str, list[Tensor]]:
    """Weights after noisy seeded runs with integer sums."""
    found = {}
    for name in names:
        settings = dict(SETTINGS[name])
        model = settings.pop("model", mlp)()
        found[name] = weights(private(shard(model) if sharded else model, **settings, **jobs.EXACT).train(steps))
    return found


def noiseless(settings: dict[str, Any], sharded: bool) -> tuple[list[Tensor], list[float], list[float]]:
    """The sum of one release, with sensitivities and the slack for rounding in them; floating-point sums."""
    run = private(shard(mlp()) if sharded else mlp(), sigma=0.0, lr=0.0, **settings).train(1)
    release = run.engine.training.release
    gradients = [p.grad.full_tensor() if sharded else p.grad for p in release.parameters]
    sums = [g.double() * run.engine.expected_batch_size for g in gradients]
    return sums, run.engine.training.sensitivity.values.tolist(), release.slack


def noisy(sigma: float = 1.0, seed: int | None = None) -> tuple[list[Tensor], bool]:
    """One release of near-empty draws over layers with many numbers; whether gradients are sharded as parameters."""
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 3)))
    run = private(model, lr=0.0, sigma=sigma, seed=seed, batch=1, bounds=wc.Bounds(layer_cap=1.0)).train(1)
    mine = run.engine.training.release.parameters
    alike = all(p.grad.placements == p.placements and p.grad.to_local().shape == p.to_local().shape for p in mine)
    return [p.grad.full_tensor() * run.engine.expected_batch_size for p in mine], alike


def afterwards() -> tuple[list[bool], list[bool], float]:
    """fully_shard's own reduction during and after an engine; the error of plain training after it."""
    x, y = table()
    run = private(shard(mlp())).train(1)
    during = [group._group.reduce_grads for group in sharded_groups(run.model)]
    model = run.engine.detach()
    after = [group._group.reduce_grads for group in sharded_groups(model)]
    twin = mlp()
    for p, whole in zip(twin.parameters(), weights(run), strict=True):
        p.data.copy_(whole)
    for net in (model, twin):
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
    pairs = zip(params(model), twin.parameters(), strict=True)
    return during, after, max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs)


def with_a_kept_gradient() -> None:
    """Something has put a gradient on a parameter while it was whole."""
    run = private(shard(mlp()))
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    twin = next(iter(run.engine.shards.twins.values()))
    twin.grad = torch.zeros_like(twin)
    run.optimizer.step()


def failures() -> dict[str, Failed | None]:
    """What is refused, each on a model of its own; ends with what leaves ranks behind."""
    world, rank = dist.get_world_size(), dist.get_rank()
    half = mlp()
    fully_shard(half[0])

    def mesh() -> None:
        private(shard(mlp(), mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("copies", "rows"))))

    def penalty(whole: bool) -> Callable[[], None]:
        def act() -> None:
            run = private(shard(mlp()))
            x, y = next(iter(run.loader))
            loss = run.criterion(run.model(x), y)  # the root's parameters are whole from here until backward()
            weight = run.model[2].weight if whole else run.engine.training.release.parameters[0]
            (loss + weight.square().sum()).backward()

        return act

    def infinite() -> None:
        run = private(shard(mlp())).train(1)
        with torch.no_grad():
            params(run.model)[0].to_local()[0, 0] = float("nan") if rank == 1 else 1.0
        run.train(2)

    def another_shape() -> None:
        model = nn.Sequential(nn.AdaptiveAvgPool1d(6), nn.Flatten(), nn.Linear(6, 3))
        x, y = table()
        run = private(fully_shard(model), data=(x[:, None], y))
        x, y = next(iter(run.loader))
        run.criterion(run.model(x.repeat(1, 1, 2)), y)

    def another_order() -> None:
        alike = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))  # sums that fit into each other's messages
        run = private(shard(alike)).train(1)
        if rank == 1:  # leaves its sums for the end of the batch, where they are reduced in another order
            run.engine.training.collector.done = None
        run.train(2)

    cast, offload = MixedPrecisionPolicy(param_dtype=torch.bfloat16), CPUOffloadPolicy(pin_memory=False)
    acts: dict[str, Callable[[], Any]] = {
        "weight norm": lambda: private(shard(mlp()), bounds=wc.Bounds(weight_norm=1.0, input_radius=1.0)),
        "weight norm and cap": lambda: private(shard(mlp()), bounds=wc.Bounds(weight_norm=1.0, joint_cap=1.0)),
        "certified": lambda: private(shard(mlp()), bounds=wc.Bounds(input_radius=1.0, limit=wc.Certified())),
        "half": lambda: private(half),
        "mesh": mesh,
        "cast": lambda: private(shard(mlp(), mp_policy=cast)),
        "offload": lambda: private(shard(mlp(), offload_policy=offload)),
        "penalty": penalty(False),
        "penalty on the whole": penalty(True),
        "kept gradient": with_a_kept_gradient,
        "not finite": infinite,
        "another shape": another_shape,
        "order": another_order,
    }
    return {name: jobs.attempt(act) for name, act in acts.items()}


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(folder: str, steps: int) -> list[Tensor]:
    run = private(shard(mlp()), momentum=0.9, **jobs.EXACT).train(steps)
    run.engine.save(Path(folder) / "saved")
    run.train(steps + 1).engine.save(Path(folder) / "later")
    return weights(run)


def resumed(folder: str, steps: int, sharded: bool, exact: bool = True) -> tuple[list[Tensor], int]:
    run = private(shard(mlp(seed=5)) if sharded else mlp(seed=5), momentum=0.9, **jobs.EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncountedReleases)
        run.engine.load(Path(folder) / "saved", exact=exact)
    run.train(run.engine.steps + steps)
    return weights(run), run.engine.steps


def unreadable(folder: str) -> Failed | None:
    run = private(shard(mlp()), momentum=0.9, **jobs.EXACT)
    return jobs.attempt(lambda: run.engine.load(Path(folder) / "saved", exact=True))


def saved_whole(folder: str) -> None:
    private(mlp(), momentum=0.9, **jobs.EXACT).train(1).engine.save(Path(folder) / "saved")


def endless(folder: str) -> None:
    """Trains until it is killed; writes down every charge that was applied, and the key of every noise."""
    place, number = Path(folder), dist.get_rank()
    jobs._note(place / "began", number, b"")
    handed = Streams.of_first

    def watched(self: Streams, tell: Any) -> Streams:
        if number == 0:  # noted before anybody else has it
            jobs._note(place / "noise", run.engine.steps - 1, self.key("which"))
        return handed(self, tell)

    Streams.of_first = watched
    run = private(shard(mlp()), seed=None, ledger=place / "run.ledger")
    if (place / "saved" / "ledger.json").exists():
        run.engine.load(place / "saved")
    rows = run.engine.training.release.owned
    while True:
        before = [r.mine().clone() for r in rows]
        run.train(run.engine.steps + 1)
        moved = torch.cat([(r.mine() - b).flatten() for r, b in zip(rows, before, strict=True)])
        jobs._note(place / f"applied-{number}", run.engine.steps - 1, hashlib.sha256(moved.numpy()).digest())
        if run.engine.steps % 3 == 0:
            run.engine.save(place / "saved")


def everything(names: list[str], settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """All of the above in one group: processes cost more than steps."""
    return {
        "runs": whole_runs(names), "in small messages": in_small_messages(), "noiseless": noiseless(settings, True),
        "noisy": noisy(), "noisy again": noisy()[0], "afterwards": afterwards(), "saved": saved(folder, 2),
        "failures": failures(),
    }  # fmt: skip


def in_small_messages() -> list[Tensor]:
    """A run whose sums go to their owners some rows at a time."""
    from weightclip.distributed import _shards

    usual, _shards._AT_ONCE = _shards._AT_ONCE, 13
    try:
        return whole_runs(["joint cap"])["joint cap"]
    finally:
        _shards._AT_ONCE = usual
