"""Save and resume: bit for bit when asked, never fewer steps, never the same noise on other sums, never half a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine_kit import Run, mlp, private, same_bits, table
from torch import nn
from torch.utils.data import Dataset

import weightclip as wc
from weightclip.engine import _checkpoint
from weightclip.engine._checkpoint import fingerprint

# resuming without a ledger says what it cannot know, which test_ledger.py looks at
pytestmark = pytest.mark.filterwarnings("ignore::weightclip.errors.UncountedReleases")


def adam(p):
    return torch.optim.AdamW(p, lr=0.05, weight_decay=0.01)


def started(seed: int | None = 3, data=None, make=mlp, **settings) -> Run:
    settings.setdefault("sigma", 1.0)
    return private(make(), data or table(24), seed=seed, batch=6, optimizer=adam, **settings)


def steps(run: Run, count: int) -> Run:
    """``count`` steps, also across the ends of passes."""
    done = 0
    while done < count:
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            done += 1
            if done == count:
                break
    return run


def dropout_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("make", "bounds"),
    [
        (mlp, wc.Bounds(input_radius=1.0, weight_norm=1.0)),
        (mlp, wc.Bounds(input_radius=1.0, refresh=4)),
        (dropout_net, wc.Bounds(input_radius=1.0)),
        (mlp, wc.Bounds(layer_cap=0.1, adaptive=wc.Adaptive(noise=2.0))),
    ],
    ids=["clipped", "refresh", "dropout", "adaptive"],
)
def test_exact_resume_equals_the_uninterrupted_run(tmp_path: Path, make, bounds: wc.Bounds) -> None:
    torch.manual_seed(11)
    whole = steps(started(make=make, bounds=bounds), 9)
    torch.manual_seed(11)
    first = steps(started(make=make, bounds=bounds), 6)
    first.engine.save(tmp_path / "run")
    torch.manual_seed(99)  # the new process has drawn other numbers
    second = started(make=make, bounds=bounds)
    second.engine.load(tmp_path / "run", exact=True)
    assert second.engine.steps == 6
    steps(second, 3)
    assert same_bits(whole.weights(), second.weights())
    assert second.engine.get_epsilon(1e-5) == whole.engine.get_epsilon(1e-5)
    for a, b in zip(whole.optimizer.state.values(), second.optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def test_default_resume_takes_fresh_noise_and_never_forgets_a_step(tmp_path: Path) -> None:
    run = steps(started(), 4)
    run.engine.save(tmp_path / "run")
    later = []
    for _ in range(2):
        other = started()
        other.engine.load(tmp_path / "run")
        assert same_bits(other.weights(), run.weights()) and other.engine.steps == 4
        steps(other, 1)
        assert other.engine.steps == 5
        later.append(other.grads())
    steps(run, 1)
    later.append(run.grads())
    for i in range(3):
        for j in range(i):
            assert all(not torch.equal(later[i][k], later[j][k]) for k in later[i])


def test_rewinding_a_live_engine_keeps_its_charges(tmp_path: Path) -> None:
    run = steps(started(), 3)
    run.engine.save(tmp_path / "run")
    at_three = run.engine.get_epsilon(1e-5)
    steps(run, 4)
    spent = run.engine.get_epsilon(1e-5)
    seen = run.grads()
    run.engine.load(tmp_path / "run")
    assert run.engine.steps == 7 and run.engine.get_epsilon(1e-5) == spent > at_three
    steps(run, 1)
    assert run.engine.steps == 8
    assert all(not torch.equal(seen[k], g) for k, g in run.grads().items())
    with pytest.raises(wc.ContractError, match="past the checkpoint"):
        run.engine.load(tmp_path / "run", exact=True)


def test_a_budget_is_not_spent_twice(tmp_path: Path) -> None:
    def budgeted() -> Run:
        return private(mlp(), table(24), sigma=None, batch=6, optimizer=adam, accountant="rdp", target_epsilon=2.0,
                       target_delta=1e-4, epochs=1.5)  # fmt: skip

    run = steps(budgeted(), 4)
    run.engine.save(tmp_path / "run")
    again = budgeted()
    again.engine.load(tmp_path / "run")
    with pytest.warns(UserWarning, match="budget"):
        again.train(3)
    assert again.engine.steps == 6
    assert again.engine.get_epsilon(1e-4) <= 2.0


def test_exact_resume_refuses_whatever_could_meet_the_same_noise_with_other_sums(tmp_path: Path) -> None:
    run = steps(started(), 2)
    run.engine.save(tmp_path / "run")
    x, y = table(24)
    other = x.clone()
    other[3, 2] += 1e-3
    cases = [
        (started(seed=4), "seed"),
        (started(seed=None), "generator"),
        (started(data=(other, y)), "data set differs"),
        (started(data=(x[:-1], y[:-1]), sample_rate=0.25), "data set differs"),
        (started(bounds=wc.Bounds(input_radius=2.0)), "bounds"),
        (started(criterion=nn.CrossEntropyLoss(label_smoothing=0.1)), "loss"),
        (started(allocation=wc.AdamAware()), "allocation"),
        (started(max_physical_batch_size=2), "max_physical_batch_size"),
        (started(sigma=2.0), "noise_multiplier"),
    ]
    for fresh, why in cases:
        before = fresh.weights()
        with pytest.raises(wc.ContractError, match=why) as error:
            fresh.engine.load(tmp_path / "run", exact=True)
        assert "\n" not in str(error.value)
        assert fresh.engine.steps == 0 and same_bits(before, fresh.weights())
    secure = steps(started(seed=None), 1)
    secure.engine.save(tmp_path / "secure")
    with pytest.raises(wc.ContractError, match="generator"):
        started().engine.load(tmp_path / "secure", exact=True)


def test_secure_runs_write_neither_seed_nor_fingerprint(tmp_path: Path) -> None:
    run = steps(started(seed=None), 1)
    run.engine.save(tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())["ledger"]
    assert ledger["streams"] is None and ledger["data"] is None
    root = run.engine.streams._root
    for file in (tmp_path / "run").iterdir():
        assert root not in file.read_bytes() and root.hex().encode() not in file.read_bytes()
    other = started(seed=None)
    other.engine.load(tmp_path / "run")
    assert other.engine.steps == 1
    steps(other, 1)


def test_other_settings_models_and_optimisers_are_refused(tmp_path: Path) -> None:
    run = steps(started(), 1)
    run.engine.save(tmp_path / "run")
    for fresh, why in (
        (started(sigma=0.5), "noise_multiplier"),
        (started(sample_rate=0.5), "sample_rate"),
        (started(expected_batch_size=7), "expected_batch_size"),
        (started(make=lambda: mlp(width=9)), "another model"),
    ):
        with pytest.raises(wc.ContractError, match=why):
            fresh.engine.load(tmp_path / "run")
        assert fresh.engine.steps == 0
    groups = private(mlp(), table(24), sigma=1.0, batch=6, seed=3,
                     optimizer=lambda p: torch.optim.AdamW([{"params": [q]} for q in p], lr=0.05))  # fmt: skip
    with pytest.raises(wc.ContractError, match="optimizer"):
        groups.engine.load(tmp_path / "run")


@pytest.mark.parametrize(
    "damage", ["steps", "weights", "no weights", "half a ledger", "no ledger", "nothing", "format"]
)
def test_damaged_folders_are_refused(tmp_path: Path, damage: str) -> None:
    run = steps(started(), 3)
    folder = tmp_path / "run"
    run.engine.save(folder)
    ledger, weights = folder / "ledger.json", next(folder.glob("weights-*"))
    text = ledger.read_text()
    if damage == "steps":
        assert '"steps": 3' in text
        ledger.write_text(text.replace('"steps": 3', '"steps": 1'))
    elif damage == "weights":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(bytes(data))
    elif damage == "no weights":
        weights.unlink()
    elif damage == "half a ledger":
        ledger.write_text(text[: len(text) // 2])
    elif damage == "no ledger":
        ledger.unlink()
    elif damage == "format":
        ledger.write_text(text.replace('"format": 2', '"format": 99'))
    else:
        folder = tmp_path / "elsewhere"
    fresh = started()
    before = fresh.weights()
    with pytest.raises(wc.WeightclipError, match="cannot read the checkpoint") as error:
        fresh.engine.load(folder)
    assert "\n" not in str(error.value)
    assert fresh.engine.steps == 0 and same_bits(before, fresh.weights())


def test_weights_that_are_not_finite_are_not_saved_and_keep_the_old_checkpoint(tmp_path: Path) -> None:
    run = steps(started(), 2)
    run.engine.save(tmp_path / "run")
    good = run.weights()
    with torch.no_grad():
        run.model[0].weight[0, 0] = torch.nan
    with pytest.raises(wc.ContractError, match="not finite"):
        run.engine.save(tmp_path / "run")
    fresh = started()
    fresh.engine.load(tmp_path / "run", exact=True)
    assert same_bits(good, fresh.weights())


@pytest.mark.parametrize("moment", ["save_file", "_checksum", "replace", "fsync"])
def test_a_save_that_fails_half_way_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch, moment: str) -> None:
    run = steps(started(), 2)
    folder = tmp_path / "run"
    run.engine.save(folder)
    good, files = run.weights(), sorted(p.name for p in folder.iterdir())
    steps(run, 1)

    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        if moment in ("replace", "fsync"):
            patch.setattr(os, moment, fail)
        else:
            patch.setattr(_checkpoint, moment, fail)
        with pytest.raises(OSError, match="disk full"):
            run.engine.save(folder)
    assert sorted(p.name for p in folder.iterdir()) == files
    fresh = started()
    fresh.engine.load(folder, exact=True)
    assert fresh.engine.steps == 2 and same_bits(good, fresh.weights())


def test_a_process_that_dies_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch) -> None:
    run = steps(started(), 1)
    folder = tmp_path / "run"
    run.engine.save(folder)
    steps(run, 1)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # dead processes clean nothing up
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.engine.save(folder)
    fresh = started()
    fresh.engine.load(folder, exact=True)
    assert fresh.engine.steps == 1
    run.engine.save(folder)
    last = started()
    last.engine.load(folder, exact=True)
    assert last.engine.steps == 2


def test_only_one_set_of_weights_is_kept(tmp_path: Path) -> None:
    run = started()
    for _ in range(3):
        steps(run, 1)
        run.engine.save(tmp_path / "deep" / "run")
    assert len(list((tmp_path / "deep" / "run").iterdir())) == 2


def test_a_draw_that_was_cut_short_is_drawn_again(tmp_path: Path) -> None:
    def make() -> Run:
        return started(max_physical_batch_size=2)

    whole = steps_of_draws(make(), 3)
    run = steps_of_draws(make(), 2)
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        break  # one piece of the third draw
    run.engine.save(tmp_path / "run")
    fresh = make()
    fresh.engine.load(tmp_path / "run", exact=True)
    steps_of_draws(fresh, 3)
    assert same_bits(whole.weights(), fresh.weights())


def steps_of_draws(run: Run, count: int) -> Run:
    while run.engine.steps < count:
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            if run.engine.steps == count:
                break
    return run


def test_the_fingerprint_sees_every_record() -> None:
    class Odd(Dataset):
        def __init__(self, last: float) -> None:
            self.last = last

        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int):
            values = np.zeros(3000, dtype=np.float32)
            values[1500] = self.last if i == 4 else i
            return {"x": values, "meta": (i, "name", b"raw")}

    run = started()
    seen = set()
    for last in (0.0, 1.0, -0.0):
        run.engine.loader.dataset = Odd(last)
        seen.add(fingerprint(run.engine, run.engine.streams))
        assert fingerprint(run.engine, run.engine.streams) in seen
    assert len(seen) == 3
    assert fingerprint(run.engine, run.engine.streams.advance(1)) not in seen


def test_nothing_to_save_or_load_before_make_private(tmp_path: Path) -> None:
    engine = wc.PrivacyEngine()
    for act in (lambda: engine.save(tmp_path / "x"), lambda: engine.load(tmp_path / "x")):
        with pytest.raises(wc.ContractError, match="make_private"):
            act()
    (tmp_path / "file").write_text("")
    with pytest.raises(wc.WeightclipError, match="cannot write"):
        started().engine.save(tmp_path / "file")


def test_optimiser_states_of_every_kind_survive(tmp_path: Path) -> None:
    for name in ("SGD", "ASGD", "NAdam", "Adafactor"):

        def make(name=name) -> Run:
            return private(mlp(), table(24), sigma=1.0, batch=6, seed=3,
                           optimizer=lambda p: getattr(torch.optim, name)(p, lr=0.01))  # fmt: skip

        whole = steps(make(), 3)
        run = steps(make(), 2)
        run.engine.save(tmp_path / name)
        fresh = make()
        fresh.engine.load(tmp_path / name, exact=True)
        steps(fresh, 1)
        assert same_bits(whole.weights(), fresh.weights()), name
