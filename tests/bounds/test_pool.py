"""Pools and reductions inside a record."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightclip.errors import CertificationError

SOUND = {
    "max": (nn.MaxPool2d(2), (1, 4, 4)),
    "max overlapping": (nn.MaxPool2d(3, stride=1), (1, 4, 4)),
    "max overlapping 3/2": (nn.MaxPool2d(3, stride=2, padding=1), (1, 5, 5)),
    "max dilated": (nn.MaxPool1d(2, stride=2, dilation=2), (1, 8)),
    "max dilated odd": (nn.MaxPool1d(3, stride=1, dilation=2), (1, 8)),
    "max 3d": (nn.MaxPool3d(2, stride=1), (1, 2, 3, 2)),
    "max of records without channels": (nn.MaxPool1d(3, stride=1), (6,)),
    "max 2d of records without channels": (nn.MaxPool2d(2, stride=1), (3, 4)),
    "average": (nn.AvgPool2d(2), (2, 4, 4)),
    "average overlapping": (nn.AvgPool2d(3, stride=1), (1, 5, 5)),
    "average padded": (nn.AvgPool1d(3, stride=2, padding=1), (2, 6)),
    "average divisor": (nn.AvgPool2d(2, divisor_override=1), (1, 4, 4)),
    "average negative divisor": (nn.AvgPool2d(2, divisor_override=-2), (1, 4, 4)),
    "average of records without channels": (nn.AvgPool1d(3, stride=1), (6,)),
    "average 3d": (nn.AvgPool3d(2), (1, 2, 2, 4)),
    "adaptive": (nn.AdaptiveAvgPool2d(1), (2, 3, 3)),
    "adaptive 2": (nn.AdaptiveAvgPool2d((2, 1)), (1, 4, 3)),
    "adaptive 1d": (nn.AdaptiveAvgPool1d(2), (2, 6)),
    "adaptive of records without channels": (nn.AdaptiveAvgPool2d((2, 1)), (4, 3)),
    "adaptive max": (nn.AdaptiveMaxPool2d(2), (1, 4, 4)),
    "mean": (lambda x: x.mean((2, 3)), (2, 3, 3)),
    "mean kept": (lambda x: x - x.mean(-1, keepdim=True), (2, 4)),
    "sum": (lambda x: x.sum(1), (4, 2)),
    "amax": (lambda x: x.amax(-1), (2, 4)),
    "amin": (lambda x: x.amin((1, 2)), (2, 4)),
}
ATTAINED = ("max", "max overlapping", "max of records without channels", "average", "adaptive", "adaptive 2", "mean",
            "sum", "amax", "average divisor")  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_bounds_hold(name, tried):
    module, shape = SOUND[name]
    found = tried(module, shape)
    if name in ATTAINED:
        assert max(found.gain.values()) > 0.999


def test_one_entry_that_wins_everywhere(tried):
    """A single large entry inside every window: MaxPool1d(3, 1) copies it three times."""
    found = tried(nn.MaxPool1d(3, stride=1), (5,))
    assert found.gain[2] > 0.999 and found.gain[1] > 0.999


@pytest.mark.parametrize(
    "target, shape, said",
    [
        (nn.MaxPool2d(2, ceil_mode=True), (1, 5, 5), "ceil_mode"),
        (nn.AvgPool2d(2, ceil_mode=True), (1, 5, 5), "ceil_mode"),
        (nn.AvgPool2d(3, padding=1, count_include_pad=False), (1, 6, 6), "count_include_pad"),
        (nn.AdaptiveAvgPool2d(2), (1, 5, 4), "divide"),
        (nn.AdaptiveAvgPool2d((4, 1)), (1, 4), "divide"),
        (nn.AdaptiveMaxPool2d(3), (1, 4, 4), "divide"),
        (nn.MaxPool2d(2, return_indices=True), (1, 4, 4), "has no rule"),
        (nn.LPPool2d(2, 2), (1, 4, 4), "."),
        (nn.FractionalMaxPool2d(2, output_size=2), (1, 4, 4), "has no rule"),
        (lambda x: F.adaptive_max_pool1d(x, 2, return_indices=True)[1].float(), (1, 4), "int64"),
        (lambda x: x.median(1).values, (3,), "has no rule"),
    ],
)
def test_refused(target, shape, said, traced):
    with pytest.raises(CertificationError, match=said):
        traced(target if isinstance(target, nn.Module) else (lambda x: target(x)), shape)


@pytest.mark.parametrize("function", [
    lambda x: x.mean(0), lambda x: x.sum(), lambda x: x.mean(), lambda x: x.amax(0), lambda x: x.amax(),
    lambda x: x.sum((0, 1)), lambda x: x.var(), lambda x: x - x.sum(0, keepdim=True), lambda x: x.mean(-2),
])  # fmt: skip
def test_reductions_over_records(function, traced):
    with pytest.raises(CertificationError, match="record"):
        traced(lambda x: function(x), (3,))


@pytest.mark.parametrize("function", [lambda x: x.norm(dim=1, keepdim=True), lambda x: x.var(1), lambda x: x.std(-1)])
def test_spread_has_no_finite_gain(function, traced):
    node = traced(lambda x: function(x), (3,)).nodes[-1]
    assert math.isinf(node.rule(node.op, 2.0).gains[0])


def test_batch_norm_is_refused_by_name(traced):
    with pytest.raises(CertificationError, match="'1'.*BatchNorm2d.*SafeGroupNorm"):
        traced(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), (1, 2, 2))
    with pytest.raises(CertificationError, match="batch_norm.*mixes records"):
        traced(lambda self, x: F.batch_norm(x, self.mean, self.var, training=True), (3,), mean=torch.zeros(3),
               var=torch.ones(3))  # fmt: skip
