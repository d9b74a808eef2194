"""How the design of a convolutional network moves the tightness of its bounds, at the initial weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.certificate import Bounds, certify
from weightclip.losses import CrossEntropy
from weightclip.nn import BlurPool2d, L2Pool2d, MaxMin, SafeGroupNorm
from weightclip.noise import Global
from weightclip_studies.data import load_images
from weightclip_studies.images._convolutions import write_table
from weightclip_studies.images._nets import Pictures, layer_norms
from weightclip_studies.images._settings import ALLOCATIONS
from weightclip_studies.images._training import ConvSettings, accuracy, train

COLUMNS = ("choice", "value", "layers", "weights_first", "weights_last", "free_first", "free_last", "channel_first",
           "channel_last")  # fmt: skip
RUN_COLUMNS = ("variant", "bound", "records", "batch", "steps", "sigma", "seeds", "median", "lowest", "highest",
               "ms_per_step", "device")  # fmt: skip
NOISE_COLUMNS = ("allocation", "layer", "parameters", "threshold", "noise_over_threshold", "share_of_variance")
_WIDTH = 16


def network(
    depth: int = 4, stride: int = 1, kernel: int = 3, pool: Callable[[], nn.Module] | None = None,
    activation: Callable[[], nn.Module] = nn.Tanh, norm: bool = False,
) -> nn.Module:  # fmt: skip
    """``depth`` convolutions of 16 channels, a halving of the map after every second one, and a dense layer."""
    layers: list[nn.Module] = []
    planes, size = 1, 28
    for i in range(depth):
        halve = i % 2 == 1 and i < 6
        step = stride if halve else 1
        layers.append(nn.Conv2d(planes, _WIDTH, kernel, step, kernel // 2))
        size = -(-size // step)
        if norm:
            layers.append(SafeGroupNorm(4, _WIDTH))
        layers.append(activation())
        if halve and pool is not None:
            layers.append(pool())
            size = size // 2
        planes = _WIDTH
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10))


def _average() -> nn.Module:
    return nn.AvgPool2d(2)


VARIANTS: dict[tuple[str, str], tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    ("base", "4 convolutions 3x3, tanh, average pooling"): (lambda: network(pool=_average), {}),
    **{("depth", str(d)): ((lambda d=d: network(d, pool=_average)), {}) for d in (1, 2, 6, 8)},
    ("stride", "2 instead of pooling"): (lambda: network(stride=2), {}),
    ("stride", "1, no pooling"): (lambda: network(), {}),
    ("kernel", "1x1"): (lambda: network(kernel=1, pool=_average), {}),
    ("kernel", "5x5"): (lambda: network(kernel=5, pool=_average), {}),
    ("pooling", "max 2x2, stride 2"): (lambda: network(pool=lambda: nn.MaxPool2d(2)), {}),
    ("pooling", "l2"): (lambda: network(pool=lambda: L2Pool2d(2)), {}),
    ("pooling", "blur"): (lambda: network(pool=BlurPool2d), {}),
    ("activation", "ReLU"): (lambda: network(pool=_average, activation=nn.ReLU), {}),
    ("activation", "MaxMin"): (lambda: network(pool=_average, activation=MaxMin), {}),
    ("normalisation", "SafeGroupNorm"): (lambda: network(pool=_average, norm=True), {}),
    ("input radius", "half the largest"): (lambda: network(pool=_average), {"radius": 0.5}),
    ("loss cap", "0.1"): (lambda: network(pool=_average), {"cap": 0.1}),
}  # fmt: skip


def tightness(model: nn.Module, x: Tensor, y: Tensor, radius: float = 1.0, cap: float | None = None) -> dict[str, str]:
    """Bounds over the median gradient, in the first and the last convolution.

    ``weights``: certified from weights and the input radius; ``free`` and ``channel``: medians of the two cheap
    bounds of each record's gradient. 1 is tight.
    """
    loss = CrossEntropy(cap=cap)
    limit = radius * float(x.flatten(1).norm(dim=1).max())
    x = x * (limit / x.flatten(1).norm(dim=1)).clamp_max(1).view(-1, 1, 1, 1)
    norms = layer_norms(model, loss, x, y)
    rows = {
        r.name: float(r.sensitivity)
        for r in certify(model, loss, example=x[:2], bounds=Bounds(input_radius=limit)).rows
    }
    convolutions = [path for path, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    found = {}
    for name, path in (("first", convolutions[0]), ("last", convolutions[-1])):
        exact = norms[path]["exact"].clamp_min(1e-12)
        found[f"weights_{name}"] = f"{rows[path] / float(exact.median()):.3g}"
        for kind in ("free", "channel"):
            found[f"{kind}_{name}"] = f"{float((norms[path][kind] / exact).median()):.3g}"
    return found


def design_study(out: Path, records: int = 64, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Every variant on the first records of Fashion-MNIST's training set; design.csv and allocation.csv in ``out``."""
    images, labels = (torch.from_numpy(a[:records].copy()) for a in load_images("fashion_mnist", "train"))
    x, y = (images.float().unsqueeze(1) - 127.5) / 64, labels.long()
    rows = []
    for (choice, value), (make, options) in VARIANTS.items():
        torch.manual_seed(0)
        model = make()
        model(x[:2])  # the dense layer learns its width
        found = tightness(model, x, y, **options)
        layers = sum(isinstance(m, nn.Conv2d) for m in model.modules())
        rows.append({"choice": choice, "value": value, "layers": layers, **found})
        say(" ".join(f"{k}={v}" for k, v in rows[-1].items()))
    out.mkdir(parents=True, exist_ok=True)
    write_table(out / "design.csv", rows, COLUMNS)
    write_table(out / "allocation.csv", allocation_rows(x, y), NOISE_COLUMNS)
    return rows


def allocation_rows(x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Noise of each layer under exact caps at the median gradient, sigma = 1, for every allocation."""
    torch.manual_seed(0)
    model = network(pool=_average)
    model(x[:2])
    norms = {path: float(n["exact"].median()) for path, n in layer_norms(model, CrossEntropy(), x, y).items()}
    sizes = [sum(p.numel() for p in model.get_submodule(path).parameters()) for path in norms]
    thresholds = torch.tensor(list(norms.values()), dtype=torch.float64)
    rows = []
    for name, allocation in {**ALLOCATIONS, "global": Global()}.items():
        scales = allocation.scales(thresholds, sizes, 1.0)
        spread = [math.sqrt(d) * float(s) for d, s in zip(sizes, scales, strict=True)]  # norm of a layer's noise
        for path, d, s in zip(norms, sizes, spread, strict=True):
            values = (name, path, d, f"{norms[path]:.4g}", f"{s / norms[path]:.4g}",
                      f"{s**2 / sum(v**2 for v in spread):.3g}")  # fmt: skip
            rows.append(dict(zip(NOISE_COLUMNS, values, strict=True)))
    return rows


def short_runs(
    path: Path, variants: Mapping[str, Mapping[str, Any]], *, records: int = 4000, batch: int = 250, steps: int = 80,
    sigma: float = 1.5, seeds: int = 3, device: str = "cpu", say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:  # fmt: skip
    """The small CNN on a part of Fashion-MNIST under caps, the same noise for every variant; one row each."""
    parts = []
    for split, count in (("train", records), ("test", 2000)):
        images, labels = (torch.from_numpy(a[:count].copy()).to(device) for a in load_images("fashion_mnist", split))
        parts.append(Pictures.load(images, labels, "small-cnn"))
    base = ConvSettings("small-cnn", "exact", batch, steps, 6e-3, quantile=0.7)
    rows: list[dict[str, Any]] = []
    for name, changes in variants.items():
        settings, found, pace = replace(base, **changes), [], []
        for seed in range(seeds):
            done = train(parts[0], settings, sigma, seed, f"{path.stem}/{name}")
            found.append(accuracy(done.model, parts[1]))
            pace.append(done.step_ms)
        numbers = [f"{v:.2f}" for v in (statistics.median(found), min(found), max(found))]
        where = torch.cuda.get_device_name() if device.startswith("cuda") else device
        values = (name, settings.bound, records, batch, steps, sigma, seeds, *numbers, f"{min(pace):.4g}", where)
        rows.append(dict(zip(RUN_COLUMNS, values, strict=True)))
        say(str(rows[-1]))
        write_table(path, rows, RUN_COLUMNS)
    return rows


def allocation_accuracy(out: Path, **options: Any) -> list[dict[str, Any]]:
    """Accuracy under every allocation: allocation_accuracy.csv."""
    return short_runs(out / "allocation_accuracy.csv", {name: {"allocation": name} for name in ALLOCATIONS}, **options)


def recipe_accuracy(out: Path, **options: Any) -> list[dict[str, Any]]:
    """Accuracy in float32, in bfloat16 autocast, compiled, and with two views of each record: recipes.csv."""
    recipes = {"float32": {}, "bf16": {"bf16": True}, "compiled": {"compiled": True}, "two views": {"views": 2}}
    return short_runs(out / "recipes.csv", {k: {"bound": "free", **v} for k, v in recipes.items()}, **options)
