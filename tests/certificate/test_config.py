"""Bounds: validation, lookup, immutability."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from tests.engine_kit import mlp
from torch import nn

import weightclip as wc

FIELDS = ("weight_norm", "input_radius", "layer_radius", "cotangent_radius", "bias_scale", "layer_cap", "joint_cap")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "value", [0, -1.0, math.nan, math.inf, 1e-30, 1e30, True, "1", [1.0], {"a": 0.0}, {"a": math.nan}]
)
def test_values_that_are_no_bounds_are_refused(field: str, value) -> None:
    with pytest.raises(wc.WeightclipError, match=field) as error:
        wc.Bounds(**{field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", FIELDS)
def test_numbers_of_every_kind_and_mappings_are_taken(field: str) -> None:
    for value in (1, 0.5, np.float32(0.5), np.float64(2.0), {"0": 0.5}, {"0": 1, "2": 2.0}):
        assert wc.Bounds(**{field: value}).of(field, "0") in (1, 0.5, 2.0)
    given = {"0": 0.5}
    bounds = wc.Bounds(**{field: given})
    given["0"] = 1e-3  # a bound that changed after it was enforced would be a lie
    assert bounds.of(field, "0") == 0.5
    assert bounds.of(field, "other") == (1.0 if field == "bias_scale" else None)


def test_the_other_fields_are_checked() -> None:
    for settings, match in (({"p": 3}, "p must"), ({"refresh": 0}, "refresh"), ({"refresh": 1.5}, "refresh"),
                            ({"joint_cap": 1.0, "layer_cap": 1.0}, "layer_cap")):  # fmt: skip
        with pytest.raises(wc.WeightclipError, match=match):
            wc.Bounds(**settings)
    with pytest.raises(dataclasses.FrozenInstanceError):
        wc.Bounds().p = 1  # type: ignore[misc]


def test_names_are_looked_up_in_the_model() -> None:
    wc.Bounds(layer_cap={"0": 1.0}, input_radius={"": 1.0, "1": 2.0}).check_names(mlp())
    with pytest.raises(wc.WeightclipError, match="no module"):
        wc.Bounds(cotangent_radius={"9": 1.0}).check_names(mlp())
    with pytest.raises(wc.WeightclipError, match="parameters of its own"):
        wc.Bounds(cotangent_radius={"inner": 1.0}).check_names(nn.ModuleDict({"inner": mlp()}))


def test_projections() -> None:
    assert wc.Bounds().projections() == {}
    assert wc.Bounds(input_radius=2).projections() == {"": 2.0}
    assert wc.Bounds(input_radius={"0": 1.0}).projections() == {"0": 1.0}


def test_the_cap_has_one_familiar_name_and_excludes_what_contradicts_it() -> None:
    assert wc.Bounds(max_grad_norm=0.5) == wc.Bounds(joint_cap=0.5)
    assert dataclasses.replace(wc.Bounds(max_grad_norm=0.5), p=2).joint_cap == 0.5
    for settings in ({"max_grad_norm": 1.0, "joint_cap": 1.0}, {"max_grad_norm": {"0": 1.0}}, {"max_grad_norm": -1.0},
                     {"max_grad_norm": 1.0, "limit": wc.Certified()}, {"limit": "certified"}):  # fmt: skip
        with pytest.raises(wc.WeightclipError):
            wc.Bounds(**settings)
    assert wc.Bounds().chosen() == wc.Bounds(joint_cap=1.0)
    for given in (wc.Bounds(weight_norm=1.0), wc.Bounds(limit=wc.Certified()), wc.Bounds(layer_cap={"0": 1.0})):
        assert given.chosen() is given
