"""Black-box checks of an engine: what anybody outside can see. The engine passes them, its mutants do not."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from tests.engine_kit import difference, layer_norms, mlp, private, release, same_bits, table, tokens
from torch import Tensor, nn

import weightclip as wc


def one_record_stays_within_the_sensitivity() -> None:
    """Huge, flipped and sequence records move no layer by more than its reported sensitivity."""
    x, y = table(12)
    for bounds in (wc.Bounds(input_radius=1.0), wc.Bounds(layer_radius=0.5, cotangent_radius=0.2)):
        extra = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])
        here, there = (private(mlp(), d, bounds=bounds, batch=12, sample_rate=1.0) for d in ((x, y), extra))
        base, limits = release(here), there.layers()
        for record, label in ((1e6 * x[0], y[0]), (x[1], (y[1] + 1) % 3), (-50 * x[2], (y[2] + 2) % 3)):
            extra[0][-1], extra[1][-1] = record, label
            for layer, moved in layer_norms(difference(release(there), base)).items():
                assert moved <= limits[layer]["sensitivity"] * (1 + 1e-4)


def a_named_argument_stays_within_the_sensitivity() -> None:
    x, y = table(4)
    run = private(nn.Sequential(mlp()[0]), (1e3 * x, y))
    for a, label in run.loader:
        run.criterion(run.model(input=a), label).backward()
        run.optimizer.step()
    assert layer_norms(run.grads())["0"] * 4 <= 4 * run.layers()["0"]["sensitivity"]


def the_sum_is_the_sum_over_the_public_batch_size() -> None:
    x, y = table(10)
    run = private(mlp(), (x, y), batch=16, sample_rate=1.0)
    plain = mlp()
    inside = x / x.norm(dim=1, keepdim=True).clamp(min=1)
    nn.functional.cross_entropy(plain(inside), y, reduction="sum").backward()
    run.train()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        assert torch.allclose(run.grads()[name], p.grad / 16, rtol=1e-4, atol=1e-6)


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 60), nn.ReLU(), nn.Linear(60, 3))


def all_layers_together_are_one_mechanism() -> None:
    """Measured noise against reported sensitivities: sum of (Delta/s)^2 is 1/sigma^2."""
    for batch in (8, 32):
        runs = [private(wide(), table(8), sigma=s, batch=batch, sample_rate=1.0) for s in (1.5, 0.0)]
        limits = runs[0].layers()
        for run in runs:
            run.train()
        noise = difference(runs[0].grads(), runs[1].grads())
        total = 0.0
        for layer, row in limits.items():
            sample = torch.cat([noise[f"{layer}.weight"].flatten(), noise[f"{layer}.bias"].flatten()]).double() * batch
            total += (row["sensitivity"] / float(sample.square().mean().sqrt())) ** 2
        assert total <= 1.5**-2 * 1.25


def steps_have_independent_noise() -> None:
    run = private(wide(), table(8), sigma=1.0, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    seen = []
    for _ in range(2):
        run.train()
        seen.append(run.grads()["2.weight"].flatten())
    assert abs(float(torch.corrcoef(torch.stack(seen))[0, 1])) < 0.1


def pieces_release_once() -> None:
    run = private(mlp(), table(8), sigma=1.0, max_physical_batch_size=2)
    moves = 0
    for x, y in run.loader:
        before = run.weights()
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        moves += not same_bits(before, run.weights())
    assert moves == 1


def every_move_of_the_weights_is_charged() -> None:
    run = private(mlp(), table(24), sigma=1.0, batch=6)
    moves = 0
    for x, y in run.loader:
        before = run.weights()
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        moves += not same_bits(before, run.weights())
        charged = sum(m.steps for m in run.engine.mechanisms())
        assert charged == moves


def a_draw_is_released_once() -> None:
    run = private(mlp(), table(24), sigma=1.0, batch=6)
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    try:
        run.criterion(run.model(x), y).backward()
    except wc.ContractError:
        return
    raise AssertionError("a spent draw served again")


def empty_draws_are_steps_of_pure_noise() -> None:
    run = private(nn.Linear(6, 3), table(6), sigma=0.0, sample_rate=0.01, batch=1)
    empty = 0
    for _, (x, y) in zip(range(40), run.loader, strict=False):
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        if len(x) == 1 and not x.any():
            empty += 1
            assert all(not g.any() for g in run.grads().values())
    assert run.engine.steps == 40 and empty >= 30


def raw_gradients_are_never_seen() -> None:
    run = private(mlp(), table(8), sigma=5.0)
    average = torch.optim.swa_utils.AveragedModel(run.model)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(2):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            assert all(p.grad is None for p in run.model.parameters())
            run.optimizer.step()
            for tensor, copy in kept:
                assert torch.equal(tensor, copy)
            kept += [(p.grad, p.grad.clone()) for p in run.model.parameters() if p.grad is not None]
            average.update_parameters(run.model)


def other_terms_leave_no_gradient() -> None:
    run = private(mlp(), table(8), sigma=5.0)
    for x, y in run.loader:
        penalty = sum(p.square().sum() for p in run.model.parameters())
        try:
            (run.criterion(run.model(x), y) + penalty).backward()
        except wc.ContractError:
            assert all(p.grad is None for p in run.model.parameters())
        else:
            raise AssertionError("another term was taken")


def clipped_weights_are_clipped_after_the_step() -> None:
    run = private(mlp(), table(8), sigma=3.0, bounds=wc.Bounds(input_radius=1.0, weight_norm=0.5))
    for _ in range(2):
        run.train()
        assert max(wc.operator_norm_bound(run.model[i]) for i in (0, 2)) <= 0.5 * (1 + 1e-6)


def large_sums_keep_single_records() -> None:
    sums = []
    for extra in (0, 1):
        n = 2048 + extra
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        loss = wc.PerRecordLoss(lambda z, y: z[:, 0] * y, bound=1.0)
        run = private(layer, (torch.ones(n, 1), torch.ones(n)), criterion=loss, batch=2048, sample_rate=1.0,
                      bounds=wc.Bounds(layer_radius=1.0, cotangent_radius=1.0))  # fmt: skip
        sums.append(float(release(run)["weight"]))
    assert 0.99 < sums[1] - sums[0] <= run.layers()[""]["sensitivity"]


def noise_is_not_rounded_to_half_precision() -> None:
    run = private(mlp(), table(8), sigma=1.0)
    run.train()
    assert all(bool((g != g.bfloat16().float()).any()) for g in run.grads().values())


def a_resumed_run_remembers_its_steps() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = private(mlp(), table(12), sigma=1.0, batch=4).train()
        run.engine.save(Path(folder) / "run")
        other = private(mlp(), table(12), sigma=1.0, batch=4)
        other.engine.load(Path(folder) / "run")
        assert other.engine.get_epsilon(1e-5) >= run.engine.get_epsilon(1e-5)
        assert other.train().engine.steps == 6


def a_rewound_run_never_repeats_noise() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = private(wide(), table(8), sigma=1.0, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
        run.engine.save(Path(folder) / "run")
        seen = []
        for _ in range(2):
            run.train()
            seen.append(run.grads()["2.weight"].flatten())
            run.engine.load(Path(folder) / "run")
        assert abs(float(torch.corrcoef(torch.stack(seen))[0, 1])) < 0.1
        assert run.engine.steps == 2


def bounds_follow_the_weights() -> None:
    run = private(mlp(), table(8), sigma=0.0, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    run.train()
    with torch.no_grad():
        run.model[2].weight.mul_(30)
    run.train()
    used = run.engine.training.sensitivity.values.tolist()[0]
    assert used >= 2 * float(torch.linalg.matrix_norm(run.model[2].weight.detach(), 2)) * 0.999  # sqrt(2) L sqrt(1 + 1)


def sequences_are_bounded_as_the_loss_sees_them() -> None:
    ids = torch.zeros(3, 2, dtype=torch.long)  # 2 positions, 3 classes: a mean over 2 positions, not over 3
    labels = torch.ones(3, 2, dtype=torch.long)
    sums = []
    for n in (2, 3):
        run = private(tokens(), (ids[:n], labels[:n]), batch=4, sample_rate=1.0)
        with torch.no_grad():
            run.model[2].bias.copy_(torch.tensor([20.0, -20.0, -20.0]))
        run.train(forward=lambda x, run=run: run.model(x).transpose(1, 2))
        sums.append({k: 4 * g for k, g in run.grads().items()})
        limit = dict(zip(run.engine.plan.layers, run.engine.training.sensitivity.values.tolist(), strict=True))
    for layer, moved in layer_norms(difference(sums[1], sums[0])).items():
        assert moved <= limit[layer]
    plain = tokens()  # a true bound: the record is not scaled
    with torch.no_grad():
        plain[2].bias.copy_(torch.tensor([20.0, -20.0, -20.0]))
    nn.functional.cross_entropy(plain(ids[2:]).transpose(1, 2), labels[2:]).backward()
    for name, p in plain.named_parameters():
        assert torch.allclose(sums[1][name] - sums[0][name], p.grad, atol=1e-5)
    # the last layer's bias sees the loss's gradient itself: sqrt(2)/sqrt(2 positions) each, both the same way
    assert limit["2"] >= math.sqrt(2) / math.sqrt(2) * math.sqrt(2)


def dropout_is_bounded_in_training_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.9), nn.Linear(8, 3)).eval()
    run = private(model, table(8))
    model.train()
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y)
    twin = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.9), nn.Linear(8, 3)).train()
    twin.load_state_dict(model.state_dict())
    expected = private(twin, table(8)).layers()["0"]["sensitivity"]
    assert run.engine.training.sensitivity.values.tolist()[0] >= expected * 0.999


CHECKS = [
    one_record_stays_within_the_sensitivity, a_named_argument_stays_within_the_sensitivity,
    the_sum_is_the_sum_over_the_public_batch_size, all_layers_together_are_one_mechanism, steps_have_independent_noise,
    pieces_release_once, every_move_of_the_weights_is_charged, empty_draws_are_steps_of_pure_noise,
    raw_gradients_are_never_seen, clipped_weights_are_clipped_after_the_step, large_sums_keep_single_records,
    noise_is_not_rounded_to_half_precision, a_resumed_run_remembers_its_steps, a_rewound_run_never_repeats_noise,
    bounds_follow_the_weights, sequences_are_bounded_as_the_loss_sees_them, dropout_is_bounded_in_training_mode,
]  # fmt: skip
