"""Checks before any step: each problem is one clear error."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from weightclip.accounting import Adjacency, Mechanism, epsilon
from weightclip.errors import ContractError, WeightclipError
from weightclip.factors import is_held


def check_layers(model: nn.Module) -> None:
    """No layer may have its products collected by another engine."""
    if any(is_held(part) for part in model.modules()):
        raise ContractError(
            "a layer of the model belongs to another private model, whose engine would get no more of its gradients: "
            "call detach() on that engine first, or give this model a copy of the layer."
        )


def check_model(model: nn.Module) -> torch.device:
    """Trainable, finite, float32 or float64, on one device, not distributed (SOUNDNESS 11); returns the device."""
    if not isinstance(model, nn.Module):
        raise WeightclipError(f"module must be a torch.nn.Module, got {type(model).__name__}.")
    for part in model.modules():
        if isinstance(part, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ContractError(
                f"{type(part).__name__} averages raw gradients before the noise: make the plain model private instead."
            )
    parameters = dict(model.named_parameters())
    if not parameters:
        raise WeightclipError("the model has no parameters: nothing to train.")
    trainable = {k: p for k, p in parameters.items() if p.requires_grad}
    if not trainable:
        raise WeightclipError("every parameter is frozen: call requires_grad_(True) on what should be trained.")
    devices = {p.device for p in parameters.values()} | {b.device for b in model.buffers()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise WeightclipError(f"the model lies on several devices ({names}): move it to one with model.to(device).")
    if torch.device("meta") in devices:
        raise WeightclipError("the model lies on the meta device, without values: give it some with model.to_empty().")
    for name, p in parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise WeightclipError(f"parameter '{name}' has no shape yet: run one forward pass on a public input first.")
        if p.requires_grad and p.dtype not in (torch.float32, torch.float64):
            raise WeightclipError(f"parameter '{name}' is {p.dtype}: keep parameters in float32 and use autocast.")
        if not torch.isfinite(p).all():
            raise WeightclipError(f"parameter '{name}' holds NaN or infinite values: initialise it anew.")
    return next(iter(devices))


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The user's own optimiser, over exactly the trainable parameters of the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WeightclipError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ContractError("LBFGS evaluates the loss several times a step: use SGD, Adam or another optimiser.")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise WeightclipError("SparseAdam needs sparse gradients, but every entry gets noise: use Adam.")
    ours = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for key, name in ours.items() if key not in theirs]
    if missing:
        raise WeightclipError(
            f"parameter '{missing[0]}' is trainable but not in the optimizer: add it, or freeze it with "
            "requires_grad_(False)."
        )
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    if theirs - set(ours) - frozen:
        raise WeightclipError("the optimizer holds parameters that are not the model's: give it model.parameters().")


def check_numbers(noise_multiplier: Any, batch: Any) -> tuple[float, float]:
    """(sigma, b) as floats: sigma >= 0, b > 0, both finite."""
    for name, value, least in (("noise_multiplier", noise_multiplier, ">= 0"), ("expected_batch_size", batch, "> 0")):
        number = not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and least == "> 0"):
            raise WeightclipError(f"{name} must be a number {least}, got {value!r}.")
    return float(noise_multiplier), float(batch)


def check_accounting(accountant: str, adjacency: Any, q: float) -> Adjacency:
    """The adjacency, if the accountant knows it."""
    try:
        relation = Adjacency(adjacency)
    except ValueError as error:
        raise WeightclipError(f"adjacency must be one of {[a.value for a in Adjacency]}, got {adjacency!r}.") from error
    if accountant == "rdp":  # refuses replace-one under Poisson sampling
        epsilon([Mechanism("gaussian", sigma=1.0, q=q, steps=1)], 1e-5, accountant=accountant, adjacency=relation)
    return relation


def check_views(views: int) -> int:
    """M >= 1, a whole number."""
    if isinstance(views, bool) or not isinstance(views, int) or views < 1:
        raise WeightclipError(f"augmentation_multiplicity must be a whole number >= 1, got {views!r}.")
    return views


def check_scale(scale: float) -> float:
    """A number other than zero."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale) or scale == 0:
        raise WeightclipError(f"loss_scale must be a number other than 0, got {scale!r}.")
    return float(scale)


def check_grid(grid: float | None) -> float | None:
    """None, or a positive number."""
    if grid is not None and not 0 < grid < float("inf"):
        raise WeightclipError(f"release_grid must be a positive number or None, got {grid!r}.")
    return grid


def check_labels(dataset: Any, output_shape: tuple[int, ...], loss: Any) -> None:
    """Class indices within the model's outputs, where the data set is a table of tensors (a check on private data)."""
    if not isinstance(dataset, TensorDataset) or len(dataset.tensors) != 2 or not hasattr(loss, "smoothing"):
        return
    labels = dataset.tensors[1]
    if labels.is_floating_point() or not output_shape or labels.numel() == 0:
        return
    # classes come first, or last where the loop transposes a sequence model's output
    shapes = {output_shape[0]: output_shape[1:], output_shape[-1]: output_shape[:-1]}
    fitting = [count for count, rest in shapes.items() if tuple(labels.shape[1:]) == tuple(rest)]
    classes = max(fitting, default=max(shapes))
    valid = labels[labels != getattr(loss, "ignore_index", -100)]
    if valid.numel() and (int(valid.min()) < 0 or int(valid.max()) >= classes):
        raise WeightclipError(
            f"labels lie in [{int(valid.min())}, {int(valid.max())}] but the model has {classes} outputs: "
            f"relabel to 0..{classes - 1} or widen the last layer."
        )
