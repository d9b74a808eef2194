"""Caps measured in a different way in each layer."""

from __future__ import annotations

import pytest
import torch
from tests.engine.test_caps import conv_net, opacus_gradients, records, released

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
