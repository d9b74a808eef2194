"""All that a model needs, in one table, and what is done about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weightclip as wc


class Strange(nn.BatchNorm2d):
    """A batch norm with something of its own."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(9, 4, max_norm=1.0, scale_grad_by_freq=True),
        nn.Sequential(nn.Conv1d(6, 48, 1), nn.BatchNorm1d(48)),
        nn.InstanceNorm1d(48, track_running_stats=True, affine=True),
        nn.Flatten(),
        nn.Linear(192, 7),
        nn.BatchNorm1d(7, affine=False),
        nn.Dropout(0.1),
    )
    for p in (net[1][1].weight, net[1][1].bias):
        nn.init.normal_(p)
    net[1][1].bias.requires_grad_(False)
    return net


def test_every_layer_is_named_at_once():
    found = wc.explain(model())
    assert [(r.name, r.kind) for r in found.rows] == [
        ("0", "Embedding"), ("0", "Embedding"), ("1.1", "BatchNorm1d"), ("2", "InstanceNorm1d"), ("5", "BatchNorm1d")
    ]  # fmt: skip
    text = str(found).splitlines()
    assert len(text) == 2 + len(found.rows) and text[0].split()[:2] == ["layer", "type"]
    assert all(r.name in line and r.fix in line for r, line in zip(found.rows, text[2:], strict=True))
    with pytest.raises(wc.ContractError, match="1.1  .*BatchNorm1d(.|\n)*InstanceNorm1d") as error:
        found.refuse()
    assert "make_compatible" in str(error.value)


def test_the_mechanical_part_is_done_and_reported():
    net, seen = model(), []
    fixed = wc.make_compatible(net, report=seen.append)
    assert len(seen) == 1 and len(seen[0].rows) == 5
    assert not wc.explain(fixed) and str(wc.explain(fixed)) == "Every layer can be trained privately."
    assert len(wc.explain(net).rows) == 5  # the model itself is as it was
    norm = fixed[1][1]
    assert isinstance(norm, nn.GroupNorm) and norm.num_groups == 24  # at least two channels each
    assert torch.equal(norm.weight, net[1][1].weight) and torch.equal(norm.bias, net[1][1].bias)
    assert norm.weight.requires_grad and not norm.bias.requires_grad
    assert fixed[5].num_groups == 1 and fixed[5].weight is None
    assert fixed[2].running_mean is None and fixed[0].max_norm is None
    assert fixed(torch.randint(0, 9, (3, 6))).shape == (3, 7)


def test_one_layer_may_be_the_whole_model():
    assert isinstance(wc.make_compatible(nn.BatchNorm2d(4), report=None), nn.GroupNorm)


def test_nothing_to_do(capsys):
    net = nn.Linear(2, 2)
    twin = wc.make_compatible(net)
    assert "Nothing had to be changed" in capsys.readouterr().out and twin is not net
    torch.testing.assert_close(twin.state_dict(), net.state_dict())


def test_a_frozen_norm_in_eval_mode_stays():
    norm = nn.BatchNorm2d(3).requires_grad_(False).eval()
    assert not wc.explain(nn.Sequential(norm))
    assert wc.explain(nn.Sequential(norm.train()))


def test_what_needs_a_decision_is_left_to_the_user():
    net = nn.Sequential(Strange(4), nn.Linear(4, 4).bfloat16(), nn.LazyLinear(3))
    found = wc.explain(net).rows
    assert [r.name for r in found] == ["0", "1", "1", "2"] and not any(r.mechanical for r in found)
    assert len(wc.explain(wc.make_compatible(net, report=None)).rows) == 4
    parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    assert [r.kind for r in wc.explain(parametrized).rows] == ["_SpectralNorm"]
