"""Layers whose bounds cannot hold are refused by name with the way out; dear ones warn with their price."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weightclip as wc
from weightclip.bounds import LayerRule
from weightclip.bounds._layer import register_layer
from weightclip.errors import CertificationError

X = torch.zeros(2, 6)


def certify(model: nn.Module, example: Tensor = X, **bounds):
    return wc.certify(model, nn.CrossEntropyLoss(), example=example, bounds=wc.Bounds(**bounds))


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4)])
def test_plain_norms_warn_with_what_they_cost(norm):
    def model(layer: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 3))

    with pytest.warns(UserWarning, match=r"'1' has gain 1/sqrt\(eps\) = 316"):
        plain = certify(model(norm), input_radius=1.0)
    safe = wc.nn.SafeLayerNorm(4, alpha=1.0) if isinstance(norm, nn.LayerNorm) else wc.nn.SafeGroupNorm(2, 4, alpha=1.0)
    cheap = certify(model(safe), input_radius=1.0)
    ratio = plain.sensitivities["0"] / cheap.sensitivities["0"]
    assert ratio == pytest.approx(1 / math.sqrt(1e-5), rel=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certify(model(safe), input_radius=1.0)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(5, 4, mode="sum"), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


def test_embedding_bag_is_refused_with_the_way_out():
    with pytest.raises(CertificationError, match=r"'bag' \(EmbeddingBag\).*use nn.Embedding followed by a sum"):
        certify(Bag(), torch.zeros(2, 3, dtype=torch.long), layer_radius=1.0, cotangent_radius=1.0)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_parametrised_weights_are_refused_by_name(name):
    layer = getattr(nn.utils.parametrizations, name)(nn.Linear(6, 3))
    kind = {"weight_norm": "WeightNorm", "spectral_norm": "SpectralNorm"}[name]
    with pytest.raises(CertificationError, match=rf"module '0'.*by {kind}.*remove_parametrizations.*weight_norm="):
        certify(nn.Sequential(layer), input_radius=1.0, weight_norm=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = getattr(nn.utils, name)(nn.Linear(6, 3))
    with pytest.raises(CertificationError, match=rf"module '0'.*torch.nn.utils.{name}.*remove_{name}"):
        certify(nn.Sequential(layer), input_radius=1.0, weight_norm=1.0)


class Scale(nn.Module):
    """A layer of the user's own: y = w x with one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class ScaleRule(LayerRule):
    def gain(self, module, op, p, numerics):
        return float(module.weight.detach().abs()) * (1 + 1e-6)

    def output(self, module, op, gain, x):
        return gain * x

    def factor(self, module, op, x, beta, p):
        return x


def test_limits_refuse_a_layer_without_an_in_product_form():
    register_layer(Scale, ScaleRule())
    model = nn.Sequential(nn.Linear(6, 4), Scale(), nn.Linear(4, 3))
    assert certify(model, input_radius=1.0).sensitivities["1"] > 0
    for name in ("cotangent_radius", "layer_radius", "layer_cap", "joint_cap"):
        with pytest.raises(
            CertificationError, match=rf"layer '1' \(Scale\) has no in-product form, which {name} needs"
        ):
            certify(model, **{"input_radius": 1.0, name: 1.0})
    certify(model, input_radius=1.0, cotangent_radius={"0": 1.0, "2": 1.0})


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        return self.head(F.scaled_dot_product_attention(h, h, h).mean(1))


def test_attention_is_refused_from_weights_alone_and_allowed_between_bounded_factors():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(CertificationError, match="layer 'mix'.*attention.*no finite gain.*cotangent_radius for 'mix'"):
        certify(Attend(), x, input_radius=1.0)
    found = certify(Attend(), x, layer_radius=1.0, cotangent_radius=0.5).sensitivities
    assert found == pytest.approx({"mix": 0.5, "head": 0.5}, rel=1e-4)
    with pytest.raises(CertificationError, match="MultiheadAttention hides its layers"):
        certify(nn.Sequential(nn.MultiheadAttention(4, 2)), x, layer_radius=1.0, cotangent_radius=0.5)
