"""Moving, dropping, copying and padding entries: exact Jacobians, and refusals along the record dimension."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightclip.bounds._shape import _most_copies
from weightclip.errors import CertificationError

SOUND = {
    "view": (lambda x: x.view(x.size(0), -1), (2, 3)),
    "reshape": (lambda x: x.reshape(-1, 3, 2), (2, 3)),
    "flatten": (nn.Flatten(), (2, 3)),
    "unflatten": (nn.Unflatten(1, (2, 3)), (6,)),
    "permute": (lambda x: x.permute(0, 2, 1), (2, 3)),
    "permute from the end": (lambda x: x.permute(-3, -1, -2), (2, 3)),
    "transpose": (lambda x: x.transpose(1, -1).contiguous(), (2, 3)),
    "movedim": (lambda x: x.movedim(1, 2), (2, 3)),
    "unsqueeze": (lambda x: x[:, None], (3,)),
    "squeeze": (lambda x: x.unsqueeze(-1).squeeze(2), (2, 3)[:1]),
    "select": (lambda x: x[:, 1], (3, 2)),
    "slice": (lambda x: x[:, 1:], (4,)),
    "slice last": (lambda x: x[..., :2], (2, 4)),
    "narrow": (lambda x: x.narrow(1, 1, 2), (4,)),
    "flip": (lambda x: x.flip(1, 2), (2, 3)),
    "roll": (lambda x: x.roll(1, -1), (4,)),
    "chunk": (lambda x: x.chunk(2, 1)[0] + 2 * x.chunk(2, 1)[1], (4,)),
    "split": (lambda x: torch.cat([3 * x.split([1, 3], 1)[1], x.split([1, 3], 1)[0]], 1), (4,)),
    "unbind": (lambda x: sum(x.unbind(1)), (3,)),
    "expand": (lambda x: x.unsqueeze(1).expand(-1, 4, -1), (3,)),
    "expand_as": (lambda x: x[:, :1].expand_as(x) + x, (3,)),
    "repeat": (lambda x: x.repeat(1, 3), (2,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), (2,)),
    "zero pad": (nn.ZeroPad2d((1, 2, 0, 1)), (2, 3, 3)),
    "pad with a value": (nn.ConstantPad1d((1, 2), 7.0), (2, 3)),
    "pad and crop": (lambda x: F.pad(x, (2, -2), value=5.0), (6,)),
    "crop": (lambda x: F.pad(x, (-1, -1)), (6,)),
    "cat": (lambda x: torch.cat([x, 2 * x, x], 1), (3,)),
    "stack": (lambda x: torch.stack([x, -x], 1), (3,)),
    "upsample": (nn.Upsample(scale_factor=3), (2, 2)),
    "upsample 2d": (nn.Upsample(scale_factor=2), (1, 2, 3)),
    "upsample to a size": (nn.Upsample(size=(4, 9)), (1, 2, 3)),
    "to": (lambda x: x.to(torch.float64), (3,)),
    "detach": (lambda x: x + x.detach(), (3,)),
}


@pytest.mark.parametrize("name", SOUND)
def test_bounds_hold(name, tried):
    target, shape = SOUND[name]
    found = tried(target, shape)
    if name not in ("split", "unbind", "cat", "chunk", "stack", "expand_as", "detach"):  # these pass several edges
        assert min(found.gain.values()) > 0.999


@pytest.mark.parametrize(
    "function, shape",
    [
        (lambda x: x.transpose(0, 1), (3, 2)),
        (lambda x: x.permute(1, 0, 2), (3, 2)),
        (lambda x: x.flip(0), (3,)),
        (lambda x: x.flip(-2), (3,)),
        (lambda x: x.roll(1, 0), (3,)),
        (lambda x: x.roll(1), (3,)),
        (lambda x: x.roll((1, 1), (0, 1)), (3,)),
        (lambda x: x[0].expand(x.shape[0], -1), (3,)),
        (lambda x: x[1:], (3,)),
        (lambda x: x[:1] + x, (3,)),
        (lambda x: x.unbind(0)[0], (3,)),
        (lambda x: torch.cat([x, x]), (3,)),
        (lambda x: x.repeat(2, 1), (3,)),
        (lambda x: x.repeat_interleave(2, 0), (3,)),
        (lambda x: x.squeeze(), (3,)),
        (lambda x: x.unsqueeze(0), (3,)),
        (lambda x: F.pad(x, (0, 0, 1, 1)), (3,)),
        (lambda x: x.reshape(3, -1).reshape(-1, 3), (3,)),
        (lambda x: x.flatten().view(3, -1), (3,)),
        (lambda x: x.view(-1), (3,)),
        (lambda x: x.T, (3,)),
        (lambda x: x[torch.arange(x.shape[0]).flip(0)], (3,)),
        (lambda x: x.index_select(0, torch.arange(x.shape[0])), (3,)),
    ],
)
def test_records_are_not_mixed(function, shape, traced):
    with pytest.raises(CertificationError, match="record|has no rule"):
        traced(lambda x: function(x) * 1.0, shape)


@pytest.mark.parametrize(
    "function, shape, said",
    [
        (nn.ReflectionPad2d(1), (1, 3, 3), "zeros"),
        (nn.ReplicationPad1d(1), (1, 3), "zeros"),
        (lambda x: F.pad(x, (1, 1), mode="circular"), (1, 3), "circular"),
        (lambda x: F.interpolate(x, scale_factor=2.05), (1, 10), "whole"),
        (lambda x: F.interpolate(x, size=5), (1, 3), "whole"),
        (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 3, 3), "has no rule"),
        (lambda x: x.view(torch.int32).float(), (3,), "int32"),
        (lambda x: x.bool().float(), (3,), "bool"),
        (lambda x: x.to(torch.uint8).float(), (3,), "uint8"),
        (lambda x: x.half().float(), (3,), "float16"),
        (lambda x: x.view(torch.float64).float(), (4,), "bits"),
        (lambda x: x[:, [0, 2]], (3,), "has no rule"),
    ],
)
def test_refused(function, shape, said, traced):
    with pytest.raises(CertificationError, match=said):
        traced(function if isinstance(function, nn.Module) else (lambda x: function(x)), shape)


def test_repeats_by_a_tensor_are_refused(traced):
    def uneven(self, x):
        return x.repeat_interleave(self.repeats, 1, output_size=4)

    with pytest.raises(CertificationError):
        traced(uneven, (2,), repeats=torch.tensor([3, 1]))


def test_most_copies_counts_what_torch_does():
    for size, out in [(1, 41), (2, 82), (3, 9), (5, 35), (4, 4), (7, 14), (3, 3 * 49), (10, 410)]:
        source = F.interpolate(torch.arange(size, dtype=torch.float32).view(1, 1, -1), size=out).long().flatten()
        assert int(source.bincount().max()) <= _most_copies(size, out)
    assert _most_copies(3, 6) == 2 and _most_copies(5, 15) == 3


def test_a_constant_in_a_concatenation_shifts_the_output(tried):
    assert tried(lambda x: torch.cat([x, x + 3], 1), (3,)).output <= 1 + 1e-9


@pytest.mark.parametrize("p, gain", [(1, 4.0), (2, 2.0), (math.inf, 1.0)])
def test_copies(p, gain, traced):
    node = traced(lambda x: x.repeat(1, 4), (3,)).nodes[-1]
    assert node.rule(node.op, p).gains == (gain,)
