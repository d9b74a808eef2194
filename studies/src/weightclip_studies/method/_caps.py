"""What each way of measuring a convolution's record gradients costs, and how tight it is."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.factors import CapNorm, Geometry, conv_record_norm

from ._files import write_csv
from ._networks import convnet, digits, train


def factors_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[nn.Conv2d, Tensor, Tensor]]:
    """Input and cotangent of every convolution, for each record."""
    found: dict[str, list[Any]] = {}
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):

            def hook(m, args, output, path=path):  # noqa: ANN001
                output.retain_grad()
                found[path] = [m, args[0].detach(), output]

            handles.append(module.register_forward_hook(hook))
    F.cross_entropy(model(x), y, reduction="sum").backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return {path: (m, a, o.grad.detach()) for path, (m, a, o) in found.items()}


def tightness(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, dict[CapNorm, tuple[float, float]]]:
    """Per convolution and kind: median and largest ratio of the measured norm to the exact one."""
    result: dict[str, dict[CapNorm, tuple[float, float]]] = {}
    for path, (conv, a, d) in factors_of(model, x, y).items():
        geometry = Geometry(tuple(conv.kernel_size), tuple(conv.stride), tuple(conv.padding), tuple(conv.dilation),  # type: ignore
                            conv.groups)  # fmt: skip
        exact = conv_record_norm(a, d, geometry, 1.0, CapNorm.EXACT).clamp(min=1e-12)
        result[path] = {}
        for kind in (CapNorm.FREE, CapNorm.CHANNEL, CapNorm.POSITION, CapNorm.EXACT):
            ratio = conv_record_norm(a, d, geometry, 1.0, kind) / exact
            result[path][kind] = (float(ratio.median()), float(ratio.max()))
    return result


def seconds(bounds: wc.Bounds | None, x: Tensor, y: Tensor, small: bool, repeats: int) -> float:
    """Median time of one training step (forward, backward, release) on the CPU; None: ordinary training."""
    model = convnet(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    times = []
    if bounds is None:
        for _ in range(repeats + 1):
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])
    engine = wc.PrivacyEngine()
    model, optimizer, loader, loss = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0, bounds=bounds,
    )  # fmt: skip
    for _ in range(repeats + 1):
        for a, b in loader:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss(model(a), b).backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def caps_study(out: Path, *, small: bool = False, batch: int = 32, repeats: int = 3, steps: int = 40) -> list[Path]:
    """results/method/caps.csv: time of a step and tightness of each kind, for layer caps and the joint cap."""
    x, y = digits(12 if small else 28)
    model = convnet(small)
    train(model, x, y, steps=steps, lr=1e-3)
    ratios = tightness(model, x[:batch], y[:batch])
    x, y = x[:batch], y[:batch]
    ordinary = seconds(None, x, y, small, repeats)
    rows: list[dict[str, Any]] = []
    for joint in (False, True):
        for kind in CapNorm:
            bounds = wc.Bounds(joint_cap=1.0, caps=kind) if joint else wc.Bounds(layer_cap=1.0, caps=kind)
            taken = seconds(bounds, x, y, small, repeats)
            row: dict[str, Any] = {"cap": "joint" if joint else "layer", "kind": kind.name.lower()}
            row |= {"step_seconds": taken, "times_ordinary": taken / ordinary}
            for path, kinds in ratios.items():
                middle, top = kinds.get(kind, kinds[CapNorm.EXACT])
                row[f"{path} median ratio"], row[f"{path} largest ratio"] = middle, top
            rows.append(row)
    taken = seconds(wc.Bounds(layer_radius=1.0, cotangent_radius=1.0), x, y, small, repeats)
    blank = {k: "" for k in rows[0]}
    rows.append({**blank, "cap": "none", "kind": "radii", "step_seconds": taken, "times_ordinary": taken / ordinary})
    rows.append({**blank, "cap": "none", "kind": "ordinary", "step_seconds": ordinary, "times_ordinary": 1.0})
    return [write_csv(out / "caps.csv", rows)]
