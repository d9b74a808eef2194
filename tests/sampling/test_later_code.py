"""Code of the user's that draws, and came after make_private or runs around a pass, draws in secret."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from tests.engine_kit import Run, mlp, private, table
from tests.sampling.test_randomness import seeded_by_the_user
from torch import Tensor, nn


def drawing_hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * (1 + torch.rand(output.shape[1:]))


def hook_on_a_layer(run: Run, patch: pytest.MonkeyPatch) -> None:
    run.model[1].register_forward_hook(drawing_hook)


def hook_on_all_modules(run: Run, patch: pytest.MonkeyPatch) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, o: drawing_hook(m, a, o) if type(m) is nn.ReLU else None
    )
    run.release = handle.remove  # type: ignore[attr-defined]


def forward_of_a_layer(run: Run, patch: pytest.MonkeyPatch) -> None:
    run.model[1].forward = lambda x: drawing_hook(run.model[1], x, torch.relu(x))


def forward_of_a_class(run: Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.ReLU, "forward", lambda self, x: drawing_hook(self, x, torch.relu(x)))


class Noisy(torch.overrides.TorchFunctionMode):
    """Code of the user's inside every operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * (1 + torch.rand(found.shape[1:])) if getattr(func, "__name__", "") == "relu" else found


def drawn_after_make_private(change: Any, patch: pytest.MonkeyPatch) -> None:
    """A model that drew nothing when it was made private takes its numbers from secret streams as soon as it draws."""
    found = []
    for _ in range(2):
        run = private(mlp(), table(8), seed=None)
        assert run.engine.training.rowwise
        next(iter(run.loader))
        change(run, patch)
        try:
            with Noisy() if change is mode_of_the_users else contextlib.nullcontext():
                for _ in range(2):  # before the first of these passes the model is tested anew
                    seeded_by_the_user(42)
                    found.append(run.model(table(8)[0]).detach())
        finally:
            patch.undo()
            getattr(run, "release", lambda: None)()
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))


def mode_of_the_users(run: Run, patch: pytest.MonkeyPatch) -> None:
    """Entered around the pass."""


CHANGES = [hook_on_a_layer, hook_on_all_modules, forward_of_a_layer, forward_of_a_class, mode_of_the_users]


def hooks_draw_in_secret() -> None:
    drawn_after_make_private(hook_on_a_layer, pytest.MonkeyPatch())


def modes_draw_in_secret() -> None:
    drawn_after_make_private(mode_of_the_users, pytest.MonkeyPatch())


@pytest.mark.parametrize("change", CHANGES)
def test_code_that_draws_and_came_after_make_private_draws_in_secret(change, monkeypatch) -> None:
    drawn_after_make_private(change, monkeypatch)


def kept_tensors_draw_in_secret() -> None:
    """Hooks on what is kept for backward run inside the pass: lossy compression of activations draws there."""
    run, drawn = private(mlp(), table(8), seed=None), []
    next(iter(run.loader))

    def pack(value: Tensor) -> Tensor:
        drawn.append(torch.rand(3))
        return value

    for _ in range(2):
        seeded_by_the_user(42)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            run.model(table(8)[0])
    assert drawn and not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_hooks_on_kept_tensors_draw_in_secret() -> None:
    kept_tensors_draw_in_secret()
