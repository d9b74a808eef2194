"""The gradients' contract: only the certified sum is released, once per draw, and only by step()."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from tests.engine_kit import Run, mlp, private, same_bits, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weightclip as wc


def start(make=mlp, bounds: wc.Bounds | None = None, **settings) -> tuple[Run, Tensor, Tensor]:
    """A private run with its first batch taken."""
    run = private(make(), table(8), bounds=bounds, **settings)
    x, y = next(iter(run.loader))
    return run, x, y


def reference(make=mlp, bounds: wc.Bounds | None = None) -> dict[str, Tensor]:
    run, x, y = start(make, bounds)
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    return run.grads()


# -- what is visible --------------------------------------------------------------------------------------------------


def test_gradients_are_hidden_until_step_and_the_release_after_it() -> None:
    run, x, y = start(sigma=1.0)
    seen: list[Tensor] = []
    bystander = torch.optim.SGD(run.model.parameters(), lr=1.0)
    before = run.weights()
    run.criterion(run.model(x), y).backward()
    assert all(p.grad is None for p in run.model.parameters())
    bystander.step()  # a second optimiser finds nothing
    assert same_bits(before, run.weights())
    run.optimizer.step()
    after = run.weights()
    for name, g in run.grads().items():
        torch.testing.assert_close(before[name] - after[name], g, atol=1e-6, rtol=1e-5)
        seen.append(run.model.get_parameter(name).grad)
    kept = [g.clone() for g in seen]
    for x, y in run.loader:  # noqa: B007 - the next step must not show through gradients somebody kept
        run.criterion(run.model(x), y).backward()
        assert all(torch.equal(a, b) for a, b in zip(seen, kept, strict=True))
        run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(seen, kept, strict=True))


def test_a_loop_without_zero_grad_does_not_add_up_releases() -> None:
    loops = []
    for clear in (True, False, "keep"):
        run = private(mlp(), table(8), sigma=1.0, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        for _ in range(3):
            for x, y in run.loader:
                if clear:
                    run.optimizer.zero_grad(set_to_none=clear is True)
                run.criterion(run.model(x), y).backward()
                run.optimizer.step()
        loops.append(run.weights())
    assert same_bits(loops[0], loops[1]) and same_bits(loops[0], loops[2])


# -- what raises, and what changes nothing ---------------------------------------------------------------------------


def scaled(run: Run, x: Tensor, y: Tensor) -> None:
    (100 * run.criterion(run.model(x), y)).backward()


def negative(run: Run, x: Tensor, y: Tensor) -> None:
    (-run.criterion(run.model(x), y)).backward()


def another_output(run: Run, x: Tensor, y: Tensor) -> None:
    (run.criterion(run.model(x), y) + run.model(x).pow(2).sum()).backward()


def earlier_output(run: Run, x: Tensor, y: Tensor) -> None:
    other = run.model(3 * x)
    (other.pow(2).sum() + run.criterion(run.model(x), y)).backward()


def same_logits(run: Run, x: Tensor, y: Tensor) -> None:
    z = run.model(x)
    (run.criterion(z, y) + 7 * z.mean(0).sum()).backward()


def logits_again_later(run: Run, x: Tensor, y: Tensor) -> None:
    z = run.model(x)
    run.criterion(z, y).backward(retain_graph=True)
    z.sum().backward()


def logits_before(run: Run, x: Tensor, y: Tensor) -> None:
    z = run.model(x)
    loss = run.criterion(z, y)
    z.sum().backward(retain_graph=True)
    loss.backward()


def weight_penalty(run: Run, x: Tensor, y: Tensor) -> None:
    penalty = sum(p.square().sum() for p in run.model.parameters())
    (run.criterion(run.model(x), y) + x.sum() * penalty).backward()


def gradient_of_a_kept_graph(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model(x), y).backward(create_graph=True)


def under_autocast_backward(run: Run, x: Tensor, y: Tensor) -> None:
    loss = run.criterion(run.model(x), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()


TWO = pytest.mark.parametrize(
    "bounds", [wc.Bounds(input_radius=1.0), wc.Bounds(joint_cap=0.2)], ids=["weights", "joint cap"]
)


@TWO
@pytest.mark.parametrize("backward", [gradient_of_a_kept_graph, under_autocast_backward])
def test_how_backward_is_called_changes_nothing(backward, bounds: wc.Bounds) -> None:
    run, x, y = start(bounds=bounds)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        backward(run, x, y)
    assert all(p.grad is None for p in run.model.parameters())
    run.optimizer.step()
    assert same_bits(run.grads(), reference(bounds=bounds))


@TWO
@pytest.mark.parametrize(
    "backward",
    [scaled, negative, another_output, earlier_output, same_logits, logits_again_later, logits_before, weight_penalty],
)
def test_other_terms_and_factors_of_the_loss_are_refused_not_dropped(backward, bounds: wc.Bounds) -> None:
    run, x, y = start(bounds=bounds)
    before = run.weights()
    with pytest.raises(wc.ContractError) as error:
        backward(run, x, y)
    assert "\n" not in str(error.value)
    assert all(p.grad is None for p in run.model.parameters())
    with pytest.raises(wc.ContractError):  # what was collected is gone
        run.optimizer.step()
    assert same_bits(before, run.weights())
    run.train()  # a clean loop goes on
    assert same_bits(run.grads(), reference(bounds=bounds))


@pytest.mark.parametrize("factor", [0.25, 1 / 3, 4.0])
def test_a_declared_scale_of_the_loss_changes_nothing(factor: float) -> None:
    run, x, y = start(loss_scale=factor)
    (run.criterion(run.model(x), y) * factor).backward()
    run.optimizer.step()
    assert same_bits(run.grads(), reference())
    run, x, y = start(loss_scale=factor)
    with pytest.raises(wc.ContractError, match="multiplied"):
        (run.criterion(run.model(x), y) * (2 * factor)).backward()


def test_penalties_on_activations_are_refused() -> None:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = torch.relu(self.first(x))
            return self.last(self.hidden)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attribute self.hidden")
        expected = reference(Shows)
        run, x, y = start(Shows)
    z = run.model(x)
    hidden = run.model.hidden
    with pytest.raises(wc.ContractError, match="penalty on activations"):
        hidden.pow(2).sum().backward(retain_graph=True)  # on its own
    run.criterion(z, y).backward()
    run.optimizer.step()
    assert same_bits(run.grads(), expected)


def test_a_hook_on_the_output_cannot_change_what_enters_the_model() -> None:
    run, x, y = start()
    z = run.model(x)
    z.register_hook(lambda g: 1e6 * torch.ones_like(g))
    with pytest.raises(wc.ContractError, match="not the private loss's"):
        run.criterion(z, y).backward()
    run.train()
    assert same_bits(run.grads(), reference())


# -- what raises ------------------------------------------------------------------------------------------------------


def closure(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model(x), y).backward()
    run.optimizer.step(lambda: run.criterion(run.model(x), y))


def keyword_closure(run: Run, x: Tensor, y: Tensor) -> None:
    run.optimizer.step(closure=lambda: run.criterion(run.model(x), y))  # without a backward pass


def second_step(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    run.optimizer.step()


def released_batch_again(run: Run, x: Tensor, y: Tensor) -> None:
    """A second release of one draw is no fresh sample: its epsilon would not be that of two draws."""
    for _ in range(2):
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()


def step_without_batch(run: Run, x: Tensor, y: Tensor) -> None:
    run.optimizer.step()


def step_without_backward(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model(x), y)
    run.optimizer.step()


def two_batches(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model(x), y).backward()
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()


def loss_twice(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model(x), y).backward()
    run.criterion(run.model(x), y).backward()


def backward_twice(run: Run, x: Tensor, y: Tensor) -> None:
    loss = run.criterion(run.model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def scaler(run: Run, x: Tensor, y: Tensor) -> None:
    scale = torch.amp.GradScaler("cpu")
    scale.scale(run.criterion(run.model(x), y)).backward()
    scale.step(run.optimizer)


def unwrapped_forward(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model.forward(x), y)


def parts_of_the_model(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model[2](torch.relu(run.model[0](x))), y)


def other_operation(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(2 * run.model(x), y)


def in_place_operation(run: Run, x: Tensor, y: Tensor) -> None:
    z = run.model(x)
    with torch.no_grad():
        z.copy_(z.sum(0).expand_as(z))
    run.criterion(z, y)


def shuffled_view(run: Run, x: Tensor, y: Tensor) -> None:
    z = run.model(x)
    run.criterion(z.as_strided((8, 3), (1, 8)), y)


def repeated_view(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model(x)[:, :1].expand(8, 3), y)


def half_a_batch(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(run.model(x[:4]), y[:4])


def foreign_tensor(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(torch.zeros(8, 3, requires_grad=True), y)


def other_model(run: Run, x: Tensor, y: Tensor) -> None:
    run.criterion(mlp()(x), y)


@pytest.mark.parametrize(
    "act",
    [closure, keyword_closure, second_step, released_batch_again, step_without_batch, step_without_backward,
     two_batches, loss_twice, backward_twice, scaler, unwrapped_forward, parts_of_the_model,
     other_operation, in_place_operation, shuffled_view, repeated_view, half_a_batch, foreign_tensor, other_model],
)  # fmt: skip
def test_breaking_the_contract_raises_and_a_clean_loop_goes_on(act) -> None:
    run, x, y = start(sigma=1.0)
    before, steps = run.weights(), run.engine.steps
    with pytest.raises(wc.ContractError) as error:
        act(run, x, y)
    assert "\n" not in str(error.value)
    if act in (second_step, released_batch_again):
        steps += 1
    else:
        assert same_bits(before, run.weights())
    assert run.engine.steps == steps
    for x, y in run.loader:  # whoever catches the error finds a working engine
        if act in (closure, keyword_closure, step_without_backward, loss_twice, backward_twice):
            with pytest.raises(wc.ContractError, match="two sampled batches"):
                run.criterion(run.model(x), y)
    run.train()
    assert run.engine.steps == steps + 1


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_closure_runs_once_and_what_it_collected_is_released(keyword: bool, kind) -> None:
    usual, run = (private(mlp(), table(8), sigma=1.0, optimizer=lambda p: kind(p, lr=0.1)) for _ in range(2))
    usual.train()
    calls = []
    for x, y in run.loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            calls.append(x)
            run.optimizer.zero_grad()
            loss = run.criterion(run.model(x), y)
            loss.backward()
            return loss

        shown = run.optimizer.step(closure=closure) if keyword else run.optimizer.step(closure)
        assert isinstance(shown, Tensor)
    assert len(calls) == run.engine.steps == 1
    assert same_bits(usual.grads(), run.grads()) and same_bits(usual.weights(), run.weights())


def test_the_criterion_needs_a_batch_of_the_loader() -> None:
    run = private(mlp(), table(8))
    with pytest.raises(wc.ContractError, match="loader"):
        run.criterion(run.model(table(8)[0]), table(8)[1])


def test_lbfgs_data_parallel_and_a_second_engine_are_refused() -> None:
    data = table(8)
    with pytest.raises(wc.ContractError, match="LBFGS"):
        private(mlp(), data, optimizer=lambda p: torch.optim.LBFGS(p))
    for wrap in (nn.DataParallel, lambda m: nn.Sequential(nn.DataParallel(m))):
        with pytest.raises(wc.ContractError, match="DataParallel"):
            private(wrap(mlp()), data)
    run = private(mlp(), data)
    with pytest.raises(wc.ContractError, match="already private"):
        private(run.model, data)
    with pytest.raises(wc.ContractError, match="new PrivacyEngine"):
        run.engine.make_private(module=mlp(), optimizer=run.optimizer, data_loader=run.loader, criterion=None,
                                noise_multiplier=1.0)  # fmt: skip


def test_distributed_data_parallel_is_refused_before_and_after(tmp_path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(wc.ContractError, match="DistributedDataParallel"):
            private(DistributedDataParallel(mlp()), table(8))
        run, x, y = start()
        wrapped = DistributedDataParallel(run.model)
        with pytest.raises(wc.ContractError, match="DistributedDataParallel"):
            run.criterion(wrapped(x), y)
    finally:
        dist.destroy_process_group()
