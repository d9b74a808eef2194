"""Caps measured in a different way in each layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.engine.test_caps import conv_net, opacus_gradients, records, released
from torch import nn

import weightclip as wc


def test_each_layer_measures_in_its_own_way() -> None:
    """Named layers are capped exactly; the others by the free bound, which takes away more."""
    x, y = records(True, 1)
    gradients = opacus_gradients(conv_net(), x, y)
    paths = list(dict.fromkeys(k.rsplit(".", 1)[0] for k in gradients))
    exact = {
        p: sum(float(g.square().sum()) for k, g in gradients.items() if k.startswith(p + ".")) ** 0.5 for p in paths
    }
    caps = {p: 0.99 * v for p, v in exact.items()}
    _, mine = released(conv_net(), x, y, wc.Bounds(layer_cap=caps, caps={"2": wc.CapNorm.EXACT}))
    kept = {p: sum(float(g.square().sum()) for k, g in mine.items() if k.startswith(p + ".")) ** 0.5 for p in paths}
    assert kept["2"] == pytest.approx(caps["2"], rel=1e-5) and kept["5"] == pytest.approx(caps["5"], rel=1e-5)
    assert kept["0"] < 0.9 * caps["0"]
    _, all_free = released(conv_net(), x, y, wc.Bounds(layer_cap=caps, caps=wc.CapNorm.FREE))
    torch.testing.assert_close(mine["0.weight"], all_free["0.weight"])


def test_ways_are_for_layers_that_are_there() -> None:
    with pytest.raises(wc.WeightclipError, match="names '9'"):
        released(conv_net(), *records(True, 1), wc.Bounds(layer_cap=1.0, caps={"9": wc.CapNorm.EXACT}))
    with pytest.raises(wc.WeightclipError, match="goes with layer_cap"):
        wc.Bounds(joint_cap=1.0, caps={"0": wc.CapNorm.EXACT})


def steep_net() -> nn.Module:
    """Outputs are large, so that gradients inside can be larger than float32 goes while those at the output are not."""
    net = conv_net()
    with torch.no_grad():
        for p in net[5].parameters():
            p *= 1e4
    return net


def loud(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy; for labels that come a second time the sum of the outputs, times 1e18."""
    return torch.where(y > 2, 1e18 * out.sum(1), F.cross_entropy(1e-4 * out, y % 3, reduction="none"))


def gap(each: bool, hostile: bool = False) -> float:
    """Relative distance of a release (of the default product) from the oracle's; half of the records are clipped.

    ``hostile``: one more record, whose own gradient overflows, must add nothing.
    """
    x, y = records(True, 8)
    exact = layer_gradients(steep_net(), x, y)
    layers = {name: rows.norm(dim=1) for name, rows in exact.items()}
    whole = torch.stack(list(layers.values())).square().sum(0).sqrt()
    caps = {name: float(norms.median()) for name, norms in layers.items()} if each else {"": float(whole.median())}
    want = []
    for name, rows in exact.items():
        limit, norms = (caps[name], layers[name]) if each else (caps[""], whole)
        want.append((rows * (limit / norms).clamp(max=1.0)[:, None]).sum(0))
    if hostile:
        x, y = torch.cat([x, 1e16 * x[-1:]]), torch.cat([y, y[-1:] + 3])
    bounds = wc.Bounds(layer_cap=caps) if each else wc.Bounds(max_grad_norm=caps[""])
    _, mine = released(steep_net(), x, y, bounds, wc.PerRecordLoss(loud, bound=1e19))
    got, flat = torch.cat([g.flatten() for g in mine.values()]), torch.cat(want)
    return float((got - flat).norm() / flat.norm())


def layer_gradients(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """(records, entries) of every layer, weight and bias together, one record at a time."""
    found: dict[str, list[torch.Tensor]] = {}
    for i in range(len(x)):
        net.zero_grad()
        loud(net(x[i : i + 1]), y[i : i + 1]).sum().backward()
        for name, part in net.named_modules():
            own = [p.grad.flatten().double() for p in part.parameters(recurse=False)]
            if own:
                found.setdefault(name, []).append(torch.cat(own))
    return {name: torch.stack(rows) for name, rows in found.items()}


@pytest.mark.parametrize("hostile", [False, True], ids=["usual", "overflow"])
@pytest.mark.parametrize("each", [False, True], ids=["joint", "each layer"])
def test_convolutions_on_the_cpu_are_exact(each: bool, hostile: bool) -> None:
    assert gap(each, hostile) <= 1e-5
