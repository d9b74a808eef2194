"""Convolutions: gain, output and parameter factor against exact derivatives, for random geometries."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from weightclip.bounds import Numerics
from weightclip.certificate._graph import trace
from weightclip.errors import CertificationError


def geometry(seed: int):
    """A random small convolution and its input's shape."""
    draw = random.Random(seed)
    axes = draw.choice([1, 1, 2, 2, 3])
    groups = draw.choice([1, 1, 2])
    size = [draw.randint(3, 6 if axes < 3 else 3) for _ in range(axes)]
    kernel = [draw.randint(1, 3 if axes < 3 else 2) for _ in range(axes)]
    dilation = [draw.choice([1, 1, 2]) if (k - 1) * 2 < n else 1 for k, n in zip(kernel, size, strict=True)]
    stride = [draw.choice([1, 1, 2, 3]) for _ in range(axes)]
    mode = draw.choice(["zeros", "zeros", "circular"])
    padding = [draw.randint(0, d * (k - 1) // 2 if mode == "circular" else 2)
               for k, d in zip(kernel, dilation, strict=True)]  # fmt: skip
    if mode == "circular":
        stride = [s if n % s == 0 else 1 for s, n in zip(stride, size, strict=True)]
    torch.manual_seed(seed)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    module = kind(2 * groups // draw.choice([1, groups]), 2 * groups, kernel, stride, padding, dilation, groups,
                  bias=draw.random() < 0.5, padding_mode=mode)  # fmt: skip
    return module, (module.in_channels, *size)


def exact_factor(module: nn.Module, x: torch.Tensor, beta: float, p: float) -> float:
    names = [n for n, _ in module.named_parameters()]
    values = [q.detach() for _, q in module.named_parameters()]

    def output(*new):
        return torch.func.functional_call(module, dict(zip(names, new, strict=True)), (x.unsqueeze(0),)).flatten()

    blocks = torch.autograd.functional.jacobian(output, tuple(values))
    j = torch.cat([b.flatten(1) * (beta if n == "bias" else 1.0) for n, b in zip(names, blocks, strict=True)], 1)
    if p == 2:
        return float(torch.linalg.matrix_norm(j, 2))
    if math.isinf(p):
        return float(j.norm(dim=1).max())
    return float((torch.linalg.svd(j)[0][:, :3].T.sign() @ j).norm(dim=1).max())


@pytest.mark.parametrize("seed", range(40))
def test_random_geometries(seed, tried):
    module, shape = geometry(seed)
    if any(n + 2 * p < d * (k - 1) + 1 for n, p, d, k in
           zip(shape[1:], module.padding, module.dilation, module.kernel_size, strict=True)):  # fmt: skip
        pytest.skip("the kernel does not fit")
    found = tried(module, shape)
    assert found.gain[2] > 0.3
    node = trace(module, torch.zeros(2, *shape, dtype=torch.float64)).nodes[-1]
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64), torch.ones(*shape, dtype=torch.float64)]
    spike = torch.zeros(*shape, dtype=torch.float64)
    spike[(0, *(n // 2 for n in shape[1:]))] = 1.0  # one entry seen by as many patches as possible
    for x in [*inputs, spike]:
        for p in (1, 2, math.inf):
            for beta in (1.0, 0.2):
                bound = float(node.layer.factor(module, node.op, float(x.norm()), beta, p))
                assert exact_factor(module, x, beta, p) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_transposed(seed, tried):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    stride = draw.choice([1, 2, 3])
    module = nn.ConvTranspose1d(2, 4, draw.choice([2, 3]), stride, padding=draw.choice([0, 1]),
                                output_padding=draw.randint(0, stride - 1), groups=draw.choice([1, 2]),
                                dilation=draw.choice([1, 2]) if stride > 1 else 1)  # fmt: skip
    tried(module, (2, 4))
    node = trace(module, torch.zeros(2, 2, 4, dtype=torch.float64)).nodes[-1]
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for p in (1, 2, math.inf):
        bound = float(node.layer.factor(module, node.op, float(x.norm()), 0.5, p))
        assert exact_factor(module, x, 0.5, p) <= bound * (1 + 1e-9)


def test_a_kernel_that_wraps_around_its_input():
    """n = 2, k = 3: one patch holds an entry twice, so its norm exceeds the record's."""
    module = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular", bias=False).double()
    node = trace(module, torch.zeros(2, 1, 2, dtype=torch.float64)).nodes[-1]
    x = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    exact = exact_factor(module, x, 1.0, math.inf)
    assert exact > 1.4
    assert exact <= float(node.layer.factor(module, node.op, 1.0, 1.0, math.inf)) * (1 + 1e-12)


def test_overlap_is_attained():
    module = nn.Conv1d(1, 1, 3, padding=1, bias=False).double()
    node = trace(module, torch.zeros(2, 1, 5, dtype=torch.float64)).nodes[-1]
    x = torch.zeros(1, 5, dtype=torch.float64)
    x[0, 2] = 1.0
    assert exact_factor(module, x, 1.0, 2) >= 0.57 * float(node.layer.factor(module, node.op, 1.0, 1.0, 2))


@pytest.mark.parametrize(
    "module, shape, said",
    [
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), (1, 4, 4), "reflect"),
        (nn.Conv1d(1, 1, 3, padding=1, padding_mode="replicate"), (1, 4), "replicate"),
        (nn.Conv1d(1, 1, 3, padding=2, padding_mode="circular"), (1, 4), "circular"),
        (nn.Conv1d(1, 1, 2, stride=2, padding=0, padding_mode="circular"), (1, 5), "stride"),
        (nn.Conv2d(2, 1, 1), (3, 3), "record"),
    ],
)
def test_refused(module, shape, said):
    with pytest.raises(CertificationError, match=said):
        trace(nn.Sequential(module), torch.zeros(2, *shape))


def test_transposed_with_an_output_size_of_its_own(traced):
    layer = nn.ConvTranspose1d(1, 1, 3, stride=2)
    with pytest.raises(CertificationError, match="output_size"):
        traced(lambda self, x: self.layer(x, output_size=[8]), (1, 3), layer=layer)


def test_larger_inputs_than_certified_may_have_a_larger_norm():
    """Why shapes are part of the certificate: the gain at 2 pixels is no bound at 32."""
    module = nn.Conv1d(1, 1, 3, padding=1, bias=False)
    nn.init.ones_(module.weight)
    gains = [float(node.layer.gain(module, node.op, 2, Numerics()))
             for n in (2, 32) for node in [trace(module, torch.zeros(2, 1, n)).nodes[-1]]]  # fmt: skip
    assert gains[0] < gains[1] <= 3 * (1 + 1e-6)
