"""Convolutional networks through the engine: how tight each layer's bound is, and what a tighter one costs."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from weightclip.certificate import Bounds
from weightclip.engine import PrivacyEngine
from weightclip.factors import CapNorm
from weightclip.losses import CrossEntropy
from weightclip.models import SmallCNN
from weightclip.noise import AdamAware
from weightclip_studies.data import load_images
from weightclip_studies.images._synthetic import dead_leaves

COLUMNS = ("dataset", "model", "method", "step", "layer", "sensitivity", "median_gradient", "largest_gradient",
           "accuracy", "cpu_seconds_per_step", "device")  # fmt: skip
_RADIUS = 10.0  # of an image with pixels in [0, 1]; MNIST's have norms around 9


def synthetic_radii(model: nn.Module, loss: CrossEntropy) -> dict[str, tuple[float, float, float]]:
    """Per layer, medians over synthetic pictures of ||(U, beta)||, ||delta|| and the gradient's norm: public radii."""
    images, labels = dead_leaves(128, 28, 1, seed=5), torch.arange(128) % 10
    images = images * (_RADIUS / images.flatten(1).norm(dim=1).clamp_min(1e-6)).clamp_max(1).view(-1, 1, 1, 1)
    layers = {p: m for p, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str, module: nn.Module) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            x = args[0]
            if isinstance(module, nn.Conv2d):
                x = nn.functional.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)  # pyright: ignore
            positions = math.prod(out.shape[2:])
            out.retain_grad()
            seen[path] = ((x.flatten(1).square().sum(1) + positions).sqrt(), out)

        return hook

    handles = [m.register_forward_hook(keep(p, m)) for p, m in layers.items()]
    logits = model(images)
    logits.backward(loss.gradient(logits.detach(), labels))
    for handle in handles:
        handle.remove()
    model.zero_grad()
    gradients = record_gradients(model, loss, images, labels)
    medians = {}
    for path, (x, out) in seen.items():
        assert out.grad is not None
        delta = out.grad.flatten(1).norm(dim=1)
        medians[path] = tuple(float(v.median()) for v in (x.detach(), delta, gradients[path]))
    return medians


def record_gradients(model: nn.Module, loss: CrossEntropy, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Norm of every record's unlimited gradient, layer by layer (records,)."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def value(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, weights, (image[None],))
        gradient = loss.gradient(logits.detach(), label[None])
        return (logits * gradient).sum()

    gradients = vmap(grad(value), (None, 0, 0))(parameters, x, y)
    squares: dict[str, Tensor] = {}
    for name, g in gradients.items():
        path = name.rpartition(".")[0]
        squares[path] = squares.get(path, torch.zeros(len(x))) + g.flatten(1).square().sum(1)
    return {path: s.sqrt() for path, s in squares.items()}


def arms(radii: dict[str, tuple[float, float, float]]) -> dict[str, Bounds]:
    """The ways to bound a convolutional network, from the paper's to exact caps."""
    inputs, deltas, caps = ({p: max(r[i], 1e-6) for p, r in radii.items()} for i in range(3))

    def capped(kind: CapNorm) -> Bounds:
        return Bounds(input_radius=_RADIUS, layer_cap=caps, caps=kind)

    return {
        "weights": Bounds(input_radius=_RADIUS, weight_norm=1.0),
        "factors": Bounds(input_radius=_RADIUS, layer_radius=inputs, cotangent_radius=deltas),
        "cap-free": capped(CapNorm.FREE),
        "cap-grams": capped(CapNorm.CHANNEL),
        "cap-exact": capped(CapNorm.CHEAPEST),
        "joint-cap": Bounds(input_radius=_RADIUS, joint_cap=caps),
    }


def conv_study(
    out: Path, *, records: int = 3000, batch: int = 200, steps: int = 50, sigma: float = 1.5, cap: float = 0.5,
    every: int = 25, learning_rate: float = 4e-3, methods: tuple[str, ...] = (), say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train the small CNN on MNIST under every bound with the same noise multiplier; rows per layer and step."""
    (x, y), (xt, yt) = (
        (
            torch.from_numpy(a[:records].copy()).float().div(255).unsqueeze(1),
            torch.from_numpy(b[:records].copy()).long(),
        )
        for a, b in (load_images("mnist", "train"), load_images("mnist", "test"))
    )
    loss = CrossEntropy(cap=cap)
    torch.manual_seed(0)
    start = SmallCNN.for_mnist().state_dict()
    fresh = SmallCNN.for_mnist()
    fresh.load_state_dict(start)
    rows: list[dict[str, Any]] = []
    for method, bounds in arms(synthetic_radii(fresh, loss)).items():
        if methods and method not in methods:
            continue
        model = SmallCNN.for_mnist()
        model.load_state_dict(start)
        plain = SmallCNN.for_mnist()
        engine = PrivacyEngine()
        _, optimizer, loader, criterion = engine.make_private(
            module=model, optimizer=torch.optim.Adam(model.parameters(), lr=learning_rate),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=batch), criterion=loss, noise_multiplier=sigma,
            bounds=bounds, allocation=AdamAware(), generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        done, spent = 0, 0.0
        while done < steps:
            for images, labels in loader:
                if done % every == 0 or done == steps - 1:
                    plain.load_state_dict(model.state_dict())
                    with torch.no_grad():
                        accuracy = 100 * float((plain(xt[:2000]).argmax(1) == yt[:2000]).double().mean())
                    gradients = record_gradients(plain, loss, x[:64], y[:64])
                    for row in engine.certificate().rows:
                        g = gradients[row.name]
                        rows.append(dict(zip(COLUMNS, (
                            "mnist", "SmallCNN", method, done, row.name, f"{row.sensitivity:.4g}",
                            f"{float(g.median()):.4g}", f"{float(g.max()):.4g}", f"{accuracy:.2f}",
                            f"{spent / max(done, 1):.4g}", "cpu"), strict=True)))  # fmt: skip
                    say(f"{method} step {done} accuracy {accuracy:.1f} seconds/step {spent / max(done, 1):.3f}")
                began = time.process_time()
                optimizer.zero_grad()
                criterion(model(images), labels).backward()
                optimizer.step()
                spent += time.process_time() - began
                done += 1
                if done == steps:
                    break
        out.mkdir(parents=True, exist_ok=True)
        with (out / "tightness.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list[str](COLUMNS), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return rows
