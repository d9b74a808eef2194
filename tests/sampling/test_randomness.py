"""Dropout and augmentation draw from streams nobody knows; the user's generators are as they were."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_kit import Run, difference, layer_norms, mlp, private, same_bits, table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import weightclip as wc
from weightclip.certificate import build_plan
from weightclip.sampling._randomness import Generators, given_back, model_draws


def drop(rate: float = 0.5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Dropout(rate), nn.ReLU(), nn.Linear(32, 3))


class Foreign(nn.Module):
    """Masks from generators that are not torch's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layer = kind, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.layer(x)
        drawn = {"numpy": np.random.rand, "normal": lambda n: np.random.randn(n) ** 2,
                 "python": lambda n: [random.random() for _ in range(n)]}[self.kind](6)  # fmt: skip
        return self.layer(x * torch.tensor(np.asarray(drawn), dtype=torch.float32).clamp(max=1))


def seeded_by_the_user(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def releases(run: Run, number: int) -> dict[str, Tensor]:
    """The first release of a loop that seeds everything before every iteration and before every batch."""
    seeded_by_the_user(number)
    for x, y in run.loader:
        seeded_by_the_user(number)
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        break
    return run.grads()


def masks_do_not_come_from_the_users_seed(make: Any = drop) -> None:
    """Two secret runs differ under one user's seed; with ``generator=`` the user's seed changes nothing."""
    secret = [releases(private(make(), table(16), seed=None, bounds=CAPS), 42) for _ in range(2)]
    assert not same_bits(*secret)
    known = [releases(private(make(), table(16), seed=5, bounds=CAPS), number) for number in (42, 7)]
    assert same_bits(*known)


CAPS = wc.Bounds(layer_radius=1.0, cotangent_radius=0.5)


@pytest.mark.parametrize("make", [drop, lambda: Foreign("numpy"), lambda: Foreign("normal"), lambda: Foreign("python")])
def test_masks_do_not_come_from_the_users_seed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightclip.engine._engine.build_plan", _eager_plan)
    masks_do_not_come_from_the_users_seed(make)


def _eager_plan(module: nn.Module, *args: Any) -> Any:
    """Draws of NumPy's and Python's are no operators of a graph: the plan is that of the same layer without them."""
    if isinstance(module, Foreign):
        draw, Foreign.forward = Foreign.forward, lambda self, x: self.layer(x)  # type: ignore[method-assign]
        try:
            return build_plan(module, *args)
        finally:
            Foreign.forward = draw  # type: ignore[method-assign]
    return build_plan(module, *args)


class Augmented(Dataset):
    """Each record is shifted by a draw of every generator."""

    def __init__(self, data: tuple[Tensor, Tensor], bad: int | None = None) -> None:
        self.x, self.y = data
        self.bad = bad

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i == self.bad:
            raise RuntimeError("no such record")
        shift = torch.randn(6) + float(np.random.randn()) + random.random()
        return self.x[i] + shift, self.y[i]


def augmented(data: Any, seed: int | None = 0, workers: int = 0, **settings: Any) -> Run:
    engine, model = wc.PrivacyEngine(), mlp()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = DataLoader(data, batch_size=len(data), num_workers=workers)
    settings = {"noise_multiplier": 0.0, "sample_rate": 1.0, "expected_batch_size": 16.0, **settings}
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), data_loader=loader, bounds=CAPS,
        criterion=nn.CrossEntropyLoss(), generator=generator, **settings,
    )  # fmt: skip
    return Run(engine, *made, (data.x, data.y))


def augmentation_belongs_to_the_record() -> None:
    """With a known root one record more moves the release by what one record may, whatever the others drew."""
    x, y = table(16)
    for workers in (0, 2):
        here, there = (releases(augmented(Augmented((x[:n], y[:n])), workers=workers), 42) for n in (15, 16))
        limits = augmented(Augmented((x, y))).layers()
        for layer, moved in layer_norms(difference(there, here)).items():
            assert 16 * moved <= limits[layer]["sensitivity"] * (1 + 1e-4)
    secret = [releases(augmented(Augmented((x, y)), seed=None), 42) for _ in range(2)]
    assert not same_bits(*secret)


def test_augmentation_belongs_to_the_record() -> None:
    augmentation_belongs_to_the_record()


def test_workers_and_pieces_do_not_change_an_augmentation() -> None:
    data = Augmented(table(20))
    seen = []
    for workers, physical in ((0, None), (2, None), (0, 6), (1, 6)):
        run = augmented(data, workers=workers, max_physical_batch_size=physical, sample_rate=0.5)
        run.engine.streams = run.loader.streams = wc.noise.Streams.seeded(9)
        seen.append([torch.cat([x for x, _ in run.loader])])
    full = seen[0][0]
    for (rows,) in seen[1:]:
        assert torch.equal(rows[rows.any(1)], full[full.any(1)])


def test_each_draw_has_other_masks_and_augmentations() -> None:
    run = augmented(Augmented(table(8)))
    batches = []
    for _ in range(2):
        for x, y in run.loader:
            batches.append(x)
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
    assert not torch.equal(*batches)


def states() -> list[Any]:
    return Generators().look()


@pytest.mark.parametrize("number", [1, 2])  # an odd number of normals leaves half a pair behind
def test_the_users_generators_are_as_they_were(number: int) -> None:
    run = augmented(Augmented(table(8)))
    seeded_by_the_user(3)
    np.random.randn(number)
    before = states()
    batches = iter(run.loader)
    x, y = next(batches)
    seeded_by_the_user(3)  # a DataLoader takes one seed for its workers
    np.random.randn(number)
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    assert states() == before


def test_pythons_generator_is_given_back_with_its_half_pair() -> None:
    seen = []
    for normals in (0, 1, 2):
        random.seed(3)
        drawn = [random.gauss(0, 1) for _ in range(normals)]
        before, generators = random.getstate(), Generators()
        with given_back(generators):
            generators.seed(b"\1" * 32)
            first = [random.random() for _ in range(3)]
            generators.seed(b"\1" * 32)
            assert first == [random.random() for _ in range(3)] and random.getstate() != before
            seen.append((first, random.gauss(0, 1)))
        assert random.getstate() == before
        random.seed(3)
        assert drawn == [random.gauss(0, 1) for _ in range(normals)]
    assert seen[0] == seen[1] == seen[2]


def test_they_are_given_back_when_user_code_fails() -> None:
    run = private(drop(), table(8))
    batches = iter(run.loader)
    next(batches)
    seeded_by_the_user(3)
    before = states()
    for bad in (torch.zeros(2, 5), torch.zeros(2, 6, 6)):
        with pytest.raises((RuntimeError, wc.WeightclipError)):
            run.model(bad)
        assert states() == before
    loader = DataLoader(Augmented(table(8), bad=3), batch_size=8)
    keyed = wc.sampling.PoissonLoader(loader, sample_rate=1.0, streams=wc.noise.Streams.secure(),
                                      on_batch=lambda info: None)  # fmt: skip
    with pytest.raises(RuntimeError, match="no such record"):
        next(iter(keyed))
    seeded_by_the_user(3)
    assert states() == before


def test_evaluation_follows_the_user() -> None:
    """Without gradients and in eval() nothing is released: generators are left alone."""
    run = private(drop(), table(8))
    run.model.eval()
    with torch.no_grad():
        seeded_by_the_user(1)
        before = states()
        run.model(table(8)[0])
        assert states() == before


def test_passes_inside_passes_and_copies() -> None:
    run = private(drop(), table(8))
    randomness = run.engine.training.randomness
    seeded_by_the_user(1)
    before = states()
    with randomness.scope():
        outer = torch.rand(2)
        with randomness.scope():
            inner = torch.rand(2)
        with randomness.scope():
            again = torch.rand(2)
    assert states() == before and not torch.equal(inner, again) and not torch.equal(outer, inner)
    copied = copy.deepcopy(run.model)
    copied(table(2)[0])  # a copy has left the engine: it draws as the user says
    assert states() != before


def test_two_threads_in_one_model_are_refused() -> None:
    run = private(drop(), table(8))
    x, _ = next(iter(run.loader))
    found: list[str] = []

    def other() -> None:
        try:
            run.model(x)
        except wc.ContractError as error:
            found.append(str(error))

    with run.engine.training.randomness.scope():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "two threads" in found[0]


def test_a_chain_of_torchs_own_layers_leaves_generators_alone(monkeypatch) -> None:
    run = private(mlp(), table(8))
    monkeypatch.setattr(Generators, "seed", lambda self, key: pytest.fail("nothing draws"))
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()


def test_the_probe_sees_who_draws() -> None:
    x = torch.zeros(2, 6)
    for model, expected in ((mlp(), False), (drop(), True), (drop().eval(), True), (drop(0.0), False),
                            (Foreign("numpy"), True), (Foreign("python"), True)):  # fmt: skip
        seeded_by_the_user(2)
        before = states()
        modes = [m.training for m in model.modules()]
        assert model_draws(model, lambda m: m(x)) is expected
        assert states() == before and [m.training for m in model.modules()] == modes
    assert model_draws(nn.Linear(5, 2), (x,))  # a pass that fails may draw


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_models_that_draw_nothing_stay_one_graph_and_others_are_covered() -> None:
    torch._dynamo.reset()
    run = private(mlp(), table(8))
    whole = torch.compile(run.model, fullgraph=True, backend="aot_eager")
    run.train(forward=whole)
    seen = []
    for number in (42, 7):
        torch._dynamo.reset()
        run = private(drop(), table(16), seed=5)
        model = torch.compile(run.model, backend="aot_eager")
        for x, y in run.loader:
            seeded_by_the_user(number)
            before = states()
            out = model(x)
            assert states() == before
            run.criterion(out, y).backward()
            run.optimizer.step()
        seen.append(run.grads())
    assert same_bits(*seen)


def test_a_checkpointed_block_that_draws_again_draws_from_the_same_root() -> None:
    """Activations are computed again in the backward pass, outside the model's forward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return self.last(self.drop(self.first(x)))
            return self.last(checkpoint(lambda a: self.drop(self.first(a)), x, use_reentrant=False,
                                        preserve_rng_state=False))  # fmt: skip

    known = [releases(private(Block(), table(16), seed=5, bounds=CAPS), number) for number in (42, 7)]
    assert same_bits(*known)
