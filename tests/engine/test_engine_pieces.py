"""Physical batches: a draw in pieces is the same draw; empty draws are pure noise and count."""

from __future__ import annotations

import pytest
import torch
from tests.engine_kit import cnn, difference, layer_norms, mlp, pictures, private, same_bits, table
from torch import nn

import weightclip as wc

BOUNDS = [wc.Bounds(input_radius=1.0), wc.Bounds(layer_cap=0.2), wc.Bounds(joint_cap=0.2)]


@pytest.mark.parametrize("bounds", BOUNDS, ids=["weights", "layer cap", "joint cap"])
@pytest.mark.parametrize(("make", "draw"), [(mlp, table), (cnn, pictures)], ids=["mlp", "cnn"])
def test_pieces_release_once_and_the_same(make, draw, bounds: wc.Bounds) -> None:
    data = draw(16)
    whole = private(make(), data, sigma=0.5, bounds=bounds, pinned=0)
    whole.train(2)
    for pieces in (1, 2, 8):
        run = private(make(), data, sigma=0.5, bounds=bounds, max_physical_batch_size=16 // pieces, pinned=0)
        seen = 0
        for _ in range(2):
            for x, y in run.loader:
                assert len(x) == 16 // pieces
                before = run.weights()
                run.optimizer.zero_grad()
                run.criterion(run.model(x), y).backward()
                run.optimizer.step()
                seen += 1
                if seen % pieces:
                    assert same_bits(before, run.weights()) and all(p.grad is None for p in run.model.parameters())
        assert run.engine.steps == 2
        for name, value in run.grads().items():
            reference = whole.grads()[name]
            assert float((value - reference).norm()) <= 1e-6 * float(reference.norm())


def test_adam_takes_one_step_for_one_draw() -> None:
    data = table(16)
    runs = []
    for physical in (None, 2):
        run = private(mlp(), data, sigma=0.5, max_physical_batch_size=physical, pinned=0,
                      optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))  # fmt: skip
        run.train(3)
        runs.append(run)
        assert {float(s["step"]) for s in run.optimizer.state.values()} == {3.0}
    for name, value in runs[0].weights().items():
        torch.testing.assert_close(value, runs[1].weights()[name], rtol=1e-5, atol=1e-6)


def test_an_abandoned_draw_is_never_released() -> None:
    data = table(16)
    run = private(mlp(), data, max_physical_batch_size=4)
    for i, (x, y) in enumerate(run.loader):
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        if i == 1:
            break  # two of four pieces
    assert run.engine.steps == 0
    run.train()
    whole = private(mlp(), data).train()
    for name, value in run.grads().items():
        torch.testing.assert_close(value, whole.grads()[name], rtol=1e-5, atol=1e-6)


def test_weights_that_change_between_pieces_keep_the_limits_of_the_draw() -> None:
    """The noise of a release is scaled once: later pieces are limited to the same bound, whatever the weights are."""
    x, y = table(9)
    sums = []
    for n in (8, 9):
        run = private(mlp(), (x[:n], y[:n]), max_physical_batch_size=8, batch=8, sample_rate=1.0)
        pieces = iter(run.loader)
        for a, b in pieces:
            run.criterion(run.model(100 * a), b).backward()
            run.optimizer.step()
            with torch.no_grad():
                run.model[2].weight.mul_(50.0)
        sums.append({k: 8 * g for k, g in run.grads().items()})
        limits = dict(zip(run.engine.plan.layers, run.engine.training.sensitivity.values.tolist(), strict=True))
    for layer, moved in layer_norms(difference(sums[1], sums[0])).items():
        assert moved <= limits[layer] * (1 + 1e-5)


def test_a_step_needs_the_last_pieces_own_gradients() -> None:
    run = private(mlp(), table(8), max_physical_batch_size=4)
    pieces = iter(run.loader)
    x, y = next(pieces)
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    x, y = next(pieces)
    with pytest.raises(wc.ContractError, match="without a new batch"):
        run.optimizer.step()
    run.criterion(run.model(x), y)
    with pytest.raises(wc.ContractError, match="without a new batch"):
        run.optimizer.step()


def test_empty_draws_release_pure_noise_and_count() -> None:
    x, y = table(6)
    run = private(
        nn.Linear(6, 3), (x, y), sigma=1.0, sample_rate=1e-6, batch=4, optimizer=lambda p: torch.optim.SGD(p, 0.0)
    )
    batches = iter(run.loader)
    releases = []
    for _ in range(3):
        a, target = next(batches)
        assert a.shape == (1, 6) and not a.any()
        shown = run.criterion(run.model(a), target)
        assert float(shown.detach()) == 0  # masked
        shown.backward()
        run.optimizer.step()
        releases.append(run.grads())
    assert run.engine.steps == 3
    assert run.engine.mechanisms()[0].steps == 3
    silent = private(nn.Linear(6, 3), (x, y), sigma=0.0, sample_rate=1e-6, batch=4)
    a, target = next(iter(silent.loader))
    silent.criterion(silent.model(a), target).backward()
    silent.optimizer.step()
    assert all(not g.any() for g in silent.grads().values())
    expected = run.layers()[""]["noise"] / 4
    sample = torch.cat([g.flatten() for r in releases for g in r.values()])
    assert 0.6 * expected < float(sample.std()) < 1.5 * expected
    assert not same_bits(releases[0], releases[1])


def test_draws_differ_in_size_and_the_divisor_does_not() -> None:
    run = private(mlp(), table(40), batch=8)
    sizes = set()
    for x, y in run.loader:
        sizes.add(len(x))
        shown = run.criterion(run.model(x), y)
        torch.testing.assert_close(
            shown.detach() * 8, nn.functional.cross_entropy(run.model(x), y, reduction="sum").detach()
        )
        shown.backward()
        run.optimizer.step()
    assert len(sizes) > 1


def test_a_loss_of_an_abandoned_draw_does_not_enter_a_later_release() -> None:
    """A record of both draws would count twice in one release."""
    data = table(24)
    run = private(mlp(), data, batch=8, max_physical_batch_size=3)
    x, y = next(iter(run.loader))
    old = run.criterion(run.model(x), y)
    for x, y in run.loader:
        loss = run.criterion(run.model(x), y)
        with pytest.raises(wc.ContractError, match="earlier draw"):
            (loss + old).backward()
        break
    run.engine.training.drop()
    run.train()
    assert run.engine.steps == 3


def test_a_piece_whose_draw_was_released_enters_no_later_one() -> None:
    run = private(nn.Linear(6, 3), table(24), batch=8, max_physical_batch_size=3)
    old, left = None, 0
    for x, y in run.loader:
        loss = run.criterion(run.model(x), y)
        last = run.engine.training.info is not None and run.engine.training.info.last
        if not last and run.engine.steps == 0:
            old = loss if old is None else old
            continue
        if run.engine.steps == 1 and old is not None:
            with pytest.raises(wc.ContractError, match="earlier draw"):
                old.backward()
            old, left = None, 1
        loss.backward()
        run.optimizer.step()
    assert left == 1 and run.engine.steps == 3
