"""One step of the paper's algorithms, exactly as printed; the public door is :mod:`weightclip_studies.printed`.

Nothing here is private: the flaws, numbered in that module's docstring, are reproduced on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from weightclip.errors import WeightclipError

PerRecord = Callable[[Tensor, Tensor], Tensor]
"""A loss that maps (outputs, targets) to one value per record."""

_PARAMETRIC = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Softmax cross-entropy per record; its Lipschitz value ``tau`` is sqrt(2) (Table "Lipschitz values")."""
    return F.cross_entropy(outputs, targets, reduction="none")


class Training(TypedDict, total=False):
    """What every trainer of this module takes beside its own knobs."""

    batch_size: float
    """Expected batch size s (256)."""
    learning_rate: float
    """eta(0) (1e-3)."""
    optimizer: Callable[..., torch.optim.Optimizer]
    """Factory ``(parameters, lr=)``: Adam as in the paper's experiments (default), SGD as in the algorithms' text."""
    loss: PerRecord
    """Loss per record (softmax cross-entropy)."""
    generator: torch.Generator | None
    """Source of sampling, noise and power-iteration starts (torch's own)."""


@dataclass(frozen=True)
class PublishedRelease:
    """One released step, with the parts an audit needs to know its exact law.

    Attributes:
        gradients: What is released, per parameter name.
        means: The same before noise. Sensitive.
        noise_std: Standard deviation of the noise inside ``gradients`` (after the division by ``|V|``), per layer.
        sensitivities: The claimed ``Delta_k`` of the scaled sum, per layer.
        input_norms: ``X_k``, the largest input norm of the batch, per layer (empty for DP-SGD). Sensitive.
        batch_size: The realised ``|V|``. Sensitive.
    """

    gradients: dict[str, Tensor]
    means: dict[str, Tensor]
    noise_std: dict[str, float]
    sensitivities: dict[str, float]
    input_norms: dict[str, float]
    batch_size: int


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers ``1 .. K`` of a feed-forward model, in the order they are registered.

    Raises:
        WeightclipError: If a layer other than a linear or convolutional one has parameters.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not isinstance(module, _PARAMETRIC):
            raise WeightclipError(
                f"layer {name!r} ({type(module).__name__}) has parameters, but the paper gives a rule for linear and "
                "convolutional layers only: use a layer without parameters (affine=False) there"
            )
        if own or not list(module.children()):
            found[name] = module
    if not any(isinstance(m, _PARAMETRIC) for m in found.values()):
        raise WeightclipError("the model has no linear or convolutional layer: there is nothing to train")
    return found


def power_iteration(weight: Tensor, iterations: int = 5, generator: torch.Generator | None = None) -> Tensor:
    """Largest singular value of ``weight`` as a matrix, **from below** (flaw 8): the paper's way to compute it."""
    matrix = weight.flatten(1)
    v = torch.randn(matrix.shape[1], generator=generator).to(matrix)
    for _ in range(iterations):
        u = F.normalize(matrix @ v, dim=0)
        v = F.normalize(matrix.T @ u, dim=0)
    return (matrix @ v).norm()


def bjorck(matrix: Tensor, iterations: int) -> Tensor:
    """Björck's first-order iteration towards the nearest matrix with orthonormal rows or columns (needs norm <= 1)."""
    for _ in range(iterations):
        matrix = 1.5 * matrix - 0.5 * matrix @ (matrix.T @ matrix)
    return matrix


@torch.no_grad()
def clip_weights(
    model: nn.Module,
    max_norm: float,
    p: float = 2,
    *,
    fixed: bool = False,
    bjorck_iterations: int = 0,
    power_iterations: int = 5,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """ClipWeights of Algorithm 1, in place.

    Args:
        model: A feed-forward model.
        max_norm: ``C``.
        p: 1, 2 or ``math.inf``; 2 uses power iteration.
        fixed: Set every norm *to* C (Fix-Lip-DP-SGD) rather than at most to C.
        bjorck_iterations: Björck steps after the rescaling (p = 2 only; the paper gives no number).
        power_iterations: Steps of power iteration.
        generator: Source of its random starting vectors.

    Returns:
        ``c_k`` of every layer, 1 where a layer has no parameters (flaw 9).
    """
    gains: dict[str, float] = {}
    for name, layer in layers(model).items():
        if not isinstance(layer, _PARAMETRIC):
            gains[name] = 1.0
            continue
        matrix = layer.weight.flatten(1)
        norm = power_iteration(matrix, power_iterations, generator) if p == 2 else torch.linalg.matrix_norm(matrix, p)
        c_k = max_norm if fixed else min(max_norm, float(norm))
        if float(norm) > 0:
            for parameter in layer.parameters(recurse=False):
                parameter.mul_(c_k / norm)
            if bjorck_iterations and p == 2:
                layer.weight.copy_((c_k * bjorck(matrix / c_k, bjorck_iterations)).view_as(layer.weight))
        gains[name] = c_k
    return gains


def published_sensitivities(gains: dict[str, float], tau: float) -> dict[str, float]:
    """``Delta_k = tau * prod_{i >= k} c_i`` of Algorithm 1 (flaw 3: the product should start at k + 1)."""
    deltas, product = {}, tau
    for name, c_k in reversed(gains.items()):
        product *= c_k
        deltas[name] = product
    return dict(reversed(deltas.items()))


def lip_step(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    gains: dict[str, float],
    tau: float,
    noise_multiplier: float,
    loss: PerRecord = cross_entropy,
    generator: torch.Generator | None = None,
) -> PublishedRelease:
    """The inner loop of Algorithm 1 for a given batch: ``X_k``, ``b_k`` and the noisy gradients, without the update.

    Args:
        model: A feed-forward model.
        inputs: The batch V.
        targets: Its labels.
        gains: ``c_k`` of every layer, from :func:`clip_weights`.
        tau: Lipschitz value of the loss.
        noise_multiplier: sigma.
        loss: Loss per record.
        generator: Source of the noise.

    Returns:
        The release. Its privacy is claimed: see the flaws in the module's docstring.
    """
    size = _size(inputs)
    X: dict[str, float] = {}
    modules = {name: layer for name, layer in layers(model).items() if isinstance(layer, _PARAMETRIC)}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if name in X or len(X) != list(modules).index(name):
                raise WeightclipError(
                    f"layer {name!r} runs out of order or twice: the paper treats feed-forward chains"
                )
            X[name] = float(args[0].detach().flatten(1).norm(dim=1).max())

        return hook

    hooks = [layer.register_forward_pre_hook(record(name)) for name, layer in modules.items()]
    try:
        total = loss(model(inputs), targets).sum()
    finally:
        for handle in hooks:
            handle.remove()
    delta = published_sensitivities(gains, tau)
    names = {f"{name}.{leaf}".lstrip("."): p for name in modules for leaf, p in modules[name].named_parameters()}
    sums = dict(zip(names, torch.autograd.grad(total, list(names.values())), strict=True))
    scale = {name: 1 / (X[name] if X[name] > 0 else 1.0) for name in modules}
    means = {name: g * (scale[_owner(name)] / size) for name, g in sums.items()}
    std = {name: noise_multiplier * delta[name] / size for name in modules}
    return _release(means, std, {name: delta[name] for name in modules}, X, size, generator)


def dpsgd_step(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    max_gradient_norm: float,
    noise_multiplier: float,
    loss: PerRecord = cross_entropy,
    generator: torch.Generator | None = None,
) -> PublishedRelease:
    """One step of Algorithm 2 for a given batch: every *layer* clipped to C, noise ``sigma * C`` on each (flaw 2)."""
    size = _size(inputs)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def value(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(model, params, (x[None],)), y[None]).sum()

    per_record = vmap(grad(value), in_dims=(None, 0, 0), randomness="different")(parameters, inputs, targets)
    squares: dict[str, Tensor] = {}
    for name, g in per_record.items():
        squares[_owner(name)] = squares.get(_owner(name), 0) + g.flatten(1).square().sum(1)
    factor = {k: (max_gradient_norm / s.sqrt().clamp_min(1e-30)).clamp_max(1.0) for k, s in squares.items()}
    means = {name: torch.einsum("n,n...->...", factor[_owner(name)], g) / size for name, g in per_record.items()}
    std = {name: noise_multiplier * max_gradient_norm / size for name in squares}
    return _release(means, std, dict.fromkeys(squares, max_gradient_norm), {}, size, generator)


def _owner(parameter: str) -> str:
    """Name of the layer a parameter belongs to."""
    return parameter.rpartition(".")[0]


def _size(inputs: Tensor) -> int:
    if len(inputs) == 0:
        raise WeightclipError("the printed algorithms never take a step on an empty batch: they redraw it")
    return len(inputs)


def _release(
    means: dict[str, Tensor],
    std: dict[str, float],
    sensitivities: dict[str, float],
    input_norms: dict[str, float],
    size: int,
    generator: torch.Generator | None,
) -> PublishedRelease:
    noisy = {
        name: mean + std[_owner(name)] * torch.randn(mean.shape, generator=generator).to(mean)
        for name, mean in means.items()
    }
    return PublishedRelease(noisy, means, std, sensitivities, input_norms, size)
