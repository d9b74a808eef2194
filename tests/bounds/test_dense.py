"""Dense layers and embeddings: gain, output and parameter factor against exact derivatives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from weightclip.bounds import Numerics
from weightclip.certificate._graph import trace
from weightclip.errors import CertificationError


def parameter_factor(module: nn.Module, x: torch.Tensor, beta: float, p: float) -> float:
    """Exact (2 -> p) norm of the output's derivative in (weight, beta bias), p = 2 or inf; a lower bound for p = 1."""
    module = module.double()
    names = [n for n, q in module.named_parameters() if q.requires_grad]
    values = [dict(module.named_parameters())[n].detach() for n in names]

    def output(*new):
        return torch.func.functional_call(module, dict(zip(names, new, strict=True)), (x.unsqueeze(0),)).flatten()

    blocks = torch.autograd.functional.jacobian(output, tuple(values))
    j = torch.cat([b.flatten(1) * (beta if n == "bias" else 1.0) for n, b in zip(names, blocks, strict=True)], 1)
    if p == 2:
        return float(torch.linalg.matrix_norm(j, 2))
    if math.isinf(p):
        return float(j.norm(dim=1).max())
    signs = torch.sign(torch.randn(64, j.shape[0], generator=torch.Generator().manual_seed(0), dtype=j.dtype))
    u = torch.linalg.svd(j)[0][:, :2].T.sign()
    return float((torch.cat([signs, u]) @ j).norm(dim=1).max())  # dual: max over sign vectors of ||J^T s||_2


@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("shape, bias", [((4,), True), ((4,), False), ((3, 4), True), ((2, 3, 4), False)])
def test_dense(shape, bias, p, tried):
    torch.manual_seed(0)
    module = nn.Linear(4, 3, bias=bias)
    found = tried(module, shape)
    assert found.gain[p] > 0.999  # exact
    node = trace(module, torch.zeros(2, *shape, dtype=torch.float64)).nodes[-1]
    worst = 0.0
    for seed in range(4):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if seed == 3:
            x = torch.ones_like(x)
        for beta in (1.0, 0.3):
            bound = float(node.layer.factor(module, node.op, float(x.norm()), beta, p))
            exact = parameter_factor(module, x, beta, p)
            assert exact <= bound * (1 + 1e-9)
            worst = max(worst, exact / bound)
    assert worst > (0.999 if p == 2 and len(shape) == 1 else 0.2)


def test_frozen_parts_leave_the_factor():
    module = nn.Linear(4, 3)
    node = trace(module, torch.zeros(2, 4)).nodes[-1]
    module.bias.requires_grad_(False)
    assert float(node.layer.factor(module, node.op, 2.0, 5.0, 2)) == 2.0
    module.bias.requires_grad_(True)
    module.weight.requires_grad_(False)
    assert float(node.layer.factor(module, node.op, 2.0, 5.0, 2)) == 5.0


def test_gain_is_that_of_the_weights_as_cast():
    torch.manual_seed(1)
    module = nn.Linear(16, 16)
    node = trace(module, torch.zeros(2, 16)).nodes[-1]
    cast = module.weight.detach().bfloat16().double()
    exact = float(torch.linalg.matrix_norm(cast, 2))
    assert exact <= float(node.layer.gain(module, node.op, 2, Numerics(torch.bfloat16, 2.0**-8)))


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3)])
def test_embedding(shape):
    module = nn.Embedding(7, 5)
    node = trace(module, torch.zeros(2, *shape, dtype=torch.long)).nodes[-1]
    rule, op = node.layer, node.op
    one_row = torch.full((1, *shape), 2)  # all positions hit one row: the worst case
    delta = torch.ones(1, *shape, 5)
    (gradient,) = torch.autograd.grad((module(one_row) * delta).sum(), module.weight)
    assert float(gradient.norm()) <= float(delta.norm()) * float(rule.factor(module, op, math.inf, 1.0, 2)) * (1 + 1e-6)
    assert float(gradient.norm()) >= 0.999 * float(delta.norm()) * math.sqrt(math.prod(shape))
    largest = module.weight.norm(dim=1).argmax()
    output = module(torch.full((1, *shape), int(largest))).detach()
    assert float(output.norm()) <= float(rule.output(module, op, 0.0, math.inf)) * (1 + 1e-6)
    assert rule.gain(module, op, 2, Numerics()) == 0.0
    j_inf = float(rule.factor(module, op, math.inf, 1.0, math.inf))
    assert float(gradient.norm()) <= float(delta.abs().sum()) * j_inf * (1 + 1e-6)
    assert float(gradient.norm()) <= float(delta.abs().max()) * float(rule.factor(module, op, math.inf, 1.0, 1)) + 1e-5


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embedding_options_without_a_rule(options):
    with pytest.raises(CertificationError, match=list(options)[0].split("_")[0]):
        trace(nn.Embedding(7, 5, **options), torch.zeros(2, 3, dtype=torch.long))


def test_bilinear_is_refused(traced):
    with pytest.raises(CertificationError, match="layer.weight"):
        traced(lambda self, x: self.layer(x, x), (3,), layer=nn.Bilinear(3, 3, 2))
