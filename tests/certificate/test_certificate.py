"""Certificates: the chain of SOUNDNESS section 3 on models small enough to do by hand, and what cannot be certified."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import weightclip as wc
from weightclip.bounds import Numerics
from weightclip.certificate import build_plan
from weightclip.errors import CertificationError, WeightclipError
from weightclip.losses import recognise

CE = nn.CrossEntropyLoss()


def dense(*weights: float, bias: bool = False) -> nn.Sequential:
    """Layers c I of size 2."""
    layers = []
    for c in weights:
        layer = nn.Linear(2, 2, bias=bias)
        nn.init.eye_(layer.weight).data.mul_(c)
        if bias:
            nn.init.zeros_(layer.bias)
        layers.append(layer)
    return nn.Sequential(*layers)


def deltas(model: nn.Module, **bounds) -> list[float]:
    shape = bounds.pop("shape", (2,))
    certificate = wc.certify(model, bounds.pop("loss", CE), example=torch.zeros(1, *shape), bounds=wc.Bounds(**bounds))
    return list(certificate.sensitivities.values())


def test_one_layer():
    assert deltas(dense(5.0), input_radius=2.0) == pytest.approx([2 * math.sqrt(2)], rel=1e-5)
    assert deltas(dense(5.0, bias=True), input_radius=2.0) == pytest.approx([math.sqrt(2) * math.sqrt(5)], rel=1e-5)
    half = deltas(dense(5.0, bias=True), input_radius=2.0, bias_scale=0.5)
    assert half == pytest.approx([math.sqrt(2) * math.sqrt(4.25)], rel=1e-5)


def test_only_what_follows_a_layer_enters_its_cotangent():
    """L_k uses i > k, X_k uses i < k."""
    assert deltas(dense(0.5, 3.0, 7.0), input_radius=1.0) == pytest.approx(
        [math.sqrt(2) * 21, math.sqrt(2) * 7 * 0.5, math.sqrt(2) * 1.5], rel=1e-5
    )


def test_a_residual_block():
    model = wc.nn.Residual(dense(0.5, 0.25))
    both = deltas(nn.Sequential(dense(1.0), model), input_radius=1.0)
    root2 = math.sqrt(2)
    # before the block 1 + 0.125; inside the branch only what follows in the branch
    assert both == pytest.approx([root2 * 1.125, root2 * 0.25, root2 * 0.5], rel=1e-5)


def test_a_layer_used_twice_adds_up():
    layer = dense(0.5)[0]
    once = deltas(nn.Sequential(layer), input_radius=1.0)[0]
    twice = deltas(nn.Sequential(layer, layer), input_radius=1.0)
    assert len(twice) == 1 and twice[0] == pytest.approx(0.5 * once + 0.5 * once, rel=1e-5)


def test_one_module_under_two_names_counts_once_with_two_uses():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = dense(0.5)[0]
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x))

    assert deltas(Two(), input_radius=1.0) == pytest.approx([math.sqrt(2)], rel=1e-5)


def test_radii_and_caps():
    model = dense(0.5, 3.0)
    assert deltas(model, layer_radius=0.1, cotangent_radius=0.2) == pytest.approx([0.02, 0.02], rel=1e-4)
    assert deltas(model, layer_cap={"0": 0.3, "1": 0.4}) == pytest.approx([0.3, 0.4], rel=1e-4)
    free, capped = deltas(model, input_radius=1.0), deltas(model, input_radius=1.0, layer_cap=1.0)
    assert capped == pytest.approx([min(1.0, f) for f in free], rel=1e-4)
    mixed = deltas(model, input_radius=1.0, cotangent_radius={"0": 0.2})
    assert mixed == pytest.approx([0.2, free[1]], rel=1e-4)
    assert deltas(model, joint_cap=0.7) == pytest.approx([0.7, 0.7], rel=1e-4)


def test_projections_inside_the_model():
    model = dense(4.0, 1.0)
    assert deltas(model, input_radius={"": 1.0, "1": 0.5}) == pytest.approx(
        [math.sqrt(2), 0.5 * math.sqrt(2)], rel=1e-4
    )


@pytest.mark.parametrize("p, ce", [(1, 1.0), (2, math.sqrt(2)), (math.inf, 2.0)])
def test_the_dual_norm_at_the_loss(p, ce):
    root_numel = math.sqrt(2) if p == 1 else 1.0
    assert deltas(dense(1.0), input_radius=1.0, p=p) == pytest.approx([ce * root_numel], rel=1e-5)


def test_rows_and_json():
    certificate = wc.certify(dense(0.5, 3.0, bias=True), CE, input_radius=1.0, example=torch.zeros(1, 2))
    first, second = certificate.rows
    assert (first.name, first.kind, first.parameters) == ("0", "Linear", 6)
    assert first.gain == pytest.approx(0.5, rel=1e-5) and second.input_bound == pytest.approx(0.5, rel=1e-5)
    assert second.cotangent_bound == pytest.approx(math.sqrt(2), rel=1e-5)
    assert json.loads(certificate.to_json())["layers"][1]["sensitivity"] == second.sensitivity
    assert "joint sensitivity" in str(certificate)


def test_half_precision_rounds_activations_and_cotangents():
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    plain = wc.certify(model, CE, input_radius=1.0, example=torch.zeros(1, 2)).sensitivities
    bf16 = Numerics(torch.bfloat16, 2.0**-8)
    rounded = wc.certify(model, CE, input_radius=1.0, example=torch.zeros(1, 2), numerics=bf16).sensitivities
    # three products of two factors each, and the activation's own rounding
    assert rounded["0"] > plain["0"] * (1 + 2.0**-8) and rounded["2"] > plain["2"] * (1 + 2.0**-8)


def test_a_gain_at_hand_serves_its_own_input_size_only():
    """A convolution used at 2 and at 32 places: its norm at 2 is no bound at 32."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.conv = nn.Conv1d(1, 1, 1, bias=False), nn.Conv1d(1, 1, 3, padding=1, bias=False)
            nn.init.ones_(self.conv.weight)

        def forward(self, x):
            return self.conv(nn.functional.interpolate(self.conv(self.first(x)), scale_factor=16)).flatten(1)

    plan = build_plan(Twice(), recognise(nn.HuberLoss()), wc.Bounds(input_radius=1.0), torch.zeros(1, 1, 2))
    node = next(n for n in plan.graph.nodes if n.op.path == "conv")
    known = {"conv": node.layer.gain(node.op.module, node.op, 2, Numerics())}
    fresh, reused = plan.evaluate(Numerics()), plan.evaluate(Numerics(), known)
    assert float(reused["first"].sensitivity) == pytest.approx(float(fresh["first"].sensitivity))


def test_what_certify_needs():
    with pytest.raises(CertificationError, match="example="):
        wc.certify(dense(1.0), CE, input_radius=1.0)
    with pytest.raises(WeightclipError, match="'nothing'"):
        deltas(dense(1.0), input_radius=1.0, layer_cap={"nothing": 1.0})
    with pytest.raises(CertificationError, match="no trainable parameters"):
        deltas(dense(1.0).requires_grad_(False), input_radius=1.0)


# -- no finite bound -------------------------------------------------------------------------------------------------


class Squares(nn.Module):
    """No finite gain."""

    def forward(self, x):
        return x * x


def test_an_input_without_a_radius():
    with pytest.raises(CertificationError, match="'0'.*the model's input 'input' has no radius.*input_radius"):
        deltas(dense(1.0))


def test_a_node_without_a_gain():
    model = nn.Sequential(dense(1.0)[0], Squares(), dense(1.0)[0])
    with pytest.raises(CertificationError, match="'0'.*'mul'.*cotangent_radius"):
        deltas(model, input_radius=1.0, layer_radius={"2": 1.0})
    with pytest.raises(CertificationError, match="'2'.*'mul'.*layer_radius"):
        deltas(model, input_radius=1.0, cotangent_radius={"0": 1.0})
    enforced = {"input_radius": 1.0, "cotangent_radius": {"0": 1.0}, "layer_radius": {"2": 1.0}}
    assert deltas(model, **enforced) == pytest.approx([1.0, math.sqrt(2)], rel=1e-4)


def test_integer_inputs_are_not_projected():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x.float())

    with pytest.raises(CertificationError, match="'layer'.*integers"):
        wc.certify(Cast(), CE, input_radius=1.0, example=torch.zeros(1, 2, dtype=torch.long))
    capped = wc.certify(Cast(), CE, example=torch.zeros(1, 2, dtype=torch.long), bounds=wc.Bounds(layer_cap=1.0))
    assert capped.sensitivities["layer"] == pytest.approx(1.0, rel=1e-4)


def test_a_free_bound_behind_an_unbounded_value_needs_an_enforced_factor():
    """SafeLayerNorm bounds its output whatever the input, but inf - inf inside it is NaN, and NaN is in no ball."""
    model = nn.Sequential(wc.nn.SafeLayerNorm(2), nn.Linear(2, 2))
    with pytest.raises(CertificationError, match="'1'.*'0' \\(SafeLayerNorm\\).*overflow"):
        deltas(model)
    assert deltas(model, cotangent_radius=9.0) == pytest.approx([math.sqrt(2) * math.sqrt(3)], rel=1e-4)
    assert deltas(model, input_radius=9.0) == pytest.approx([math.sqrt(2) * math.sqrt(3)], rel=1e-4)
    behind = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    with pytest.raises(CertificationError, match="'2'.*overflow"):
        deltas(behind, layer_radius={"0": 1.0})


# -- parameters ------------------------------------------------------------------------------------------------------


def test_shared_parameters():
    model = dense(1.0, 2.0)
    model[1].weight = model[0].weight
    with pytest.raises(CertificationError, match="'weight' is shared by modules '0' and '1'.*same module twice"):
        deltas(model, input_radius=1.0)


def test_unused_parameters():
    model = dense(1.0)
    model.spare = nn.Parameter(torch.ones(2))
    with pytest.raises(CertificationError, match="'spare' is trainable but no certified layer uses it"):
        deltas(model, input_radius=1.0)
    model.spare.requires_grad_(False)
    deltas(model, input_radius=1.0)


def test_frozen_layers_count_in_the_chain_only():
    model = dense(0.5, 3.0)
    model[1].requires_grad_(False)
    assert deltas(model, input_radius=1.0) == pytest.approx([3 * math.sqrt(2)], rel=1e-5)
