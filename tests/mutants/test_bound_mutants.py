"""Every mistake of SOUNDNESS section 2 that touches a bound, made on purpose: the property tests must notice.

Each mutant is a patch inside one test. A case keeps its certificate as the code is, and breaks it under the patch.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests._networks import Case, Doubled, Mean, simple_cases
from tests.mutants.bound_kit import caught, huber, set_weights, violations
from torch import nn

import weightclip as wc
from weightclip import nn as wnn
from weightclip.bounds import Effect, _conv, _conv_norms, _dense, _normalise, _rule, plus, times
from weightclip.certificate._plan import Plan
from weightclip.factors import _dense as dense_factors
from weightclip.factors import make_layer_private
from weightclip.losses import CrossEntropy

aten = torch.ops.aten


# -- the chain ---------------------------------------------------------------------------------------------------------


def test_product_from_the_layer_itself_on(monkeypatch):
    """Delta_k = tau prod_{i >= k} c_i: too small when c_k < 1."""
    case = huber(set_weights(nn.Linear(2, 2, bias=False), [[0.2, 0.0], [0.0, 0.2]]), (2,), 2)
    original = Plan.backward

    def mutant(self, gains):
        bound = original(self, gains)
        return [times(b, gains[i][0]) if self.graph.nodes[i].layer else b for i, b in enumerate(bound)]

    caught(case, lambda: monkeypatch.setattr(Plan, "backward", mutant))


def test_users_in_place_of_edges(monkeypatch):
    """y + y is one user, two edges."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), Doubled())

    def mutant(self, gains):
        bound: list[Any] = [0.0] * len(self.graph.nodes)
        bound[self.graph.output] = self.loss_bound
        for i in reversed(range(len(self.graph.nodes))):
            for edge, gain in dict(zip(self.graph.nodes[i].edges, gains[i], strict=True)).items():
                bound[edge] = plus(bound[edge], times(bound[i], gain))
        return bound

    case = huber(set_weights(model, [[1e-3]]), (1,), 1)
    caught(case, lambda: monkeypatch.setattr(Plan, "backward", mutant))


def test_the_largest_branch_in_place_of_the_sum(monkeypatch):
    """A residual block has gain 1 + prod, not max(1, prod)."""
    inner = set_weights(nn.Linear(1, 1, bias=False), [[1.0]])
    model = nn.Sequential(set_weights(nn.Linear(1, 1, bias=False), [[1.0]]), wnn.Residual(inner))

    def mutant(self, gains):
        bound: list[Any] = [0.0] * len(self.graph.nodes)
        bound[self.graph.output] = self.loss_bound
        for i in reversed(range(len(self.graph.nodes))):
            for edge, gain in zip(self.graph.nodes[i].edges, gains[i], strict=True):
                bound[edge] = max(bound[edge], times(bound[i], gain))
        return bound

    caught(huber(model, (1,), 1), lambda: monkeypatch.setattr(Plan, "backward", mutant))


def test_the_l2_bound_of_the_loss_in_another_chain(monkeypatch):
    """p = inf needs the l1 norm of the loss's gradient: 2 for cross-entropy, not sqrt(2)."""
    model = nn.Sequential(set_weights(nn.Linear(1, 1), [[1.0]], [0.0]),
                          set_weights(nn.Linear(1, 2, bias=False), [[50.0], [-50.0]]))  # fmt: skip
    case = Case(model, (1,), CrossEntropy(), wc.Bounds(input_radius=1.0, p=math.inf), classes=2)
    original = CrossEntropy.bound
    caught(case, lambda: monkeypatch.setattr(CrossEntropy, "bound", lambda self, shape, p=2: original(self, shape, 2)))


# -- factors of the weights' gradient ----------------------------------------------------------------------------------


def test_without_the_bias(monkeypatch):
    """The gradient of (W, b) is delta (x, 1)."""
    case = huber(nn.Linear(2, 2), (2,), 2)
    caught(case, lambda: monkeypatch.setattr(_dense, "pythagoras", lambda module, weight, bias: weight))


def test_without_the_positions(monkeypatch):
    """Over S positions the bias's part is sqrt(S)."""
    model = nn.Sequential(
        set_weights(nn.Linear(1, 1), [[1.0]], [0.0]), Mean(2), nn.Flatten(), nn.Linear(4, 1, bias=False)
    )
    set_weights(model[3], [[1.0, 1.0, 1.0, 1.0]])
    case = huber(model, (4, 1), 1, input_radius=0.1)
    caught(case, lambda: monkeypatch.setattr(_dense, "positions", lambda op: 1))


def test_embeddings_as_if_each_row_were_used_once(monkeypatch):
    case = simple_cases()["embedding"]
    caught(case, lambda: monkeypatch.setattr(_dense.EmbeddingRule, "factor", lambda *args: 1.0))


def test_convolution_factor_without_the_overlap(monkeypatch):
    """One input entry meets the kernel in m places."""
    case = simple_cases()["conv"]
    caught(case, lambda: monkeypatch.setattr(_conv, "kernel_overlap", lambda conv: 1))


def test_caps_measured_by_grams_alone(monkeypatch):
    """Two positions cancel to 2^-20 of their size: a record of size 1e8 passes a cap of 1 unscaled."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False)

    def largest() -> float:
        worst = 0.0
        for power in range(4, 12):
            for tiny in (2.0**-23, 2.0**-21, 2.0**-19):
                x = torch.randn(1, 1, 4).expand(1, 2, 4) * torch.tensor([1.0, -1.0 - tiny]).view(1, 2, 1) * 10.0**power
                y = layer(x)
                (g,) = torch.autograd.grad(y, layer.weight, torch.ones_like(y))
                worst = max(worst, float(g.double().norm()))
        return worst

    make_layer_private(layer, cap=1.0)
    assert largest() <= 1 + 1e-4

    def mutant(x, d, beta, product=None):
        xs, ds = x.flatten(1, -2).float(), d.flatten(1, -2).float()
        gram = (xs @ xs.transpose(1, 2) + beta**2) * (ds @ ds.transpose(1, 2))
        return gram.sum((1, 2)).clamp(min=0).sqrt()

    monkeypatch.setattr(dense_factors, "position_gram", mutant)
    assert largest() > 1.01


# -- gains of layers ---------------------------------------------------------------------------------------------------


def test_convolution_gain_without_the_overlap(monkeypatch):
    """c = ||theta||: off by up to sqrt(m), 1.65 for a 3 x 3 kernel."""
    model = nn.Sequential(set_weights(nn.Conv1d(1, 1, 1, bias=False), [1.0]), nn.Conv1d(1, 1, 3, padding=1, bias=False),
                          nn.Flatten())  # fmt: skip
    set_weights(model[1], [[[1.0, 1.0, 1.0]]])
    case = huber(model, (1, 16), 16, starts=[torch.ones(16)])

    def mutant(module, p=2, size=None, *, dtype=None, use_dft=True):
        return _conv_norms.kernel_matrix_norm(module.weight, module.groups)

    caught(case, lambda: monkeypatch.setattr(_conv, "layer_norm_tensor", mutant))


def test_power_iteration(monkeypatch):
    """It converges from below: here not at all, as its start is orthogonal to the top direction."""
    r = math.sqrt(0.5)
    top = torch.tensor([[r], [r]]) @ torch.tensor([[r, -r]]) + 0.5 * torch.tensor([[r], [-r]]) @ torch.tensor([[r, r]])
    model = nn.Sequential(
        set_weights(nn.Linear(2, 2, bias=False), [[1.0, 0.0], [0.0, 1.0]]), nn.Linear(2, 2, bias=False)
    )
    set_weights(model[1], top.tolist())

    def mutant(module, p=2, size=None, *, dtype=None, use_dft=True):
        w, v = module.weight.detach().double(), torch.ones(module.weight.shape[1], dtype=torch.float64)
        for _ in range(5):
            v = w.T @ (w @ v)
            v = v / v.norm()
        return (w @ v).norm()

    caught(huber(model, (2,), 2), lambda: monkeypatch.setattr(_dense, "layer_norm_tensor", mutant))


def test_dft_at_the_size_of_the_input(monkeypatch):
    """Zero padding is a part of a circular convolution at n + d(k - 1), not at n."""
    model = nn.Sequential(set_weights(nn.Conv1d(1, 1, 1, bias=False), [1.0]), nn.Conv1d(1, 1, 3, padding=2, bias=False),
                          nn.Flatten())  # fmt: skip
    set_weights(model[1], [[[1.0, 0.2, -1.0]]])
    original = _conv_norms.dft_norm

    def mutant(weight, groups, dilation, size, **options):
        return original(weight, groups, dilation, size, stride=1, circular=True)

    caught(huber(model, (1, 2), 4), lambda: monkeypatch.setattr(_conv_norms, "dft_norm", mutant))


def test_dft_at_a_size_that_forgets_the_dilation(monkeypatch):
    """At n + k - 1 in place of n + d(k - 1) the frequencies miss the peak."""
    model = nn.Sequential(
        set_weights(nn.Conv1d(1, 1, 1, bias=False), [1.0]),
        set_weights(nn.Conv1d(1, 1, 3, padding=4, dilation=2, bias=False), [[[1.0, -1.0, 1.0]]]),
        nn.Flatten(),
    )
    original = _conv_norms.dft_norm

    def mutant(weight, groups, dilation, size, **options):
        sizes = [n + k - 1 for n, k in zip(size, weight.shape[2:], strict=True)]
        return original(weight, groups, dilation, sizes, stride=1, circular=True)

    case = huber(model, (1, 4), 8, starts=[[1.0, 1.0, -1.0, -1.0]])
    caught(case, lambda: monkeypatch.setattr(_conv_norms, "dft_norm", mutant))


def test_circular_padding_that_repeats_outputs(monkeypatch):
    """2 pad > d (k - 1): the same output appears twice."""
    model = nn.Sequential(set_weights(nn.Conv1d(1, 1, 1, bias=False), [1.0]),
                          nn.Conv1d(1, 1, 1, padding=1, padding_mode="circular", bias=False), nn.Flatten())  # fmt: skip
    set_weights(model[1], [[[1.0]]])
    case = huber(model, (1, 2), 4)
    with pytest.raises(wc.errors.CertificationError, match="outputs repeat"):
        case.certificate()
    monkeypatch.setattr(_conv_norms, "_check_padding", lambda *args: None)
    assert violations(case) > 0


# -- parameter-free layers with c = 1 ----------------------------------------------------------------------------------


def with_gain(monkeypatch, operator: Any, gain: float) -> None:
    """A rule whose gain is replaced."""
    original = _rule._REGISTRY.operators[operator]

    def mutant(op, p):
        effect = original(op, p)
        return Effect((gain,) * len(effect.gains), effect.offset, effect.ceiling, effect.root)

    monkeypatch.setitem(_rule._REGISTRY.operators, operator, mutant)


def test_gelu_as_one(monkeypatch):
    model = nn.Sequential(set_weights(nn.Linear(1, 1), [[1.0]], [0.0]), nn.GELU())
    case = huber(model, (1,), 1, input_radius=math.sqrt(2), starts=[[1.414]])
    caught(case, lambda: with_gain(monkeypatch, aten.gelu, 1.0))


def test_overlapping_max_pool_as_one(monkeypatch):
    """Every third entry wins three windows."""
    model = nn.Sequential(set_weights(nn.Conv1d(1, 1, 1, bias=False), [1.0]), nn.MaxPool1d(3, stride=1), nn.Flatten())
    spikes = torch.zeros(12)
    spikes[2::3] = 1.0
    case = huber(model, (1, 12), 10, starts=[spikes])
    caught(case, lambda: with_gain(monkeypatch, aten.max_pool1d, 1.0))


def test_norm_as_one(monkeypatch):
    """1/alpha, whatever the variance."""
    model = nn.Sequential(
        set_weights(nn.Linear(2, 2), [[0.1, 0.0], [0.0, 0.1]], [0.0, 0.0]), wnn.SafeLayerNorm(2, alpha=0.1)
    )
    case = huber(model, (2,), 2, starts=[[0.0, 0.0]])
    caught(case, lambda: monkeypatch.setattr(_normalise.NormRule, "gain", lambda *args: 1.0))


def test_dropout_as_the_identity(monkeypatch):
    model = nn.Sequential(set_weights(nn.Linear(1, 1), [[1.0]], [0.0]), nn.Dropout(0.5))
    caught(huber(model, (1,), 1), lambda: with_gain(monkeypatch, aten.dropout, 1.0))


def test_attention_as_one(monkeypatch):
    """No finite gain: at large inputs its Jacobian grows like the square of their size."""

    class Attend(nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(nn.Linear(1, 1, bias=False), Attend(), nn.Flatten())
    set_weights(model[0], [[1.0]])
    case = huber(model, (2, 1), 2, input_radius=20.0, starts=[[[0.0], [2.0]], [[1.0], [4.0]], [[-1.0], [5.0]]])
    with pytest.raises(wc.errors.CertificationError, match="no finite gain"):
        case.certificate()
    with_gain(monkeypatch, aten.scaled_dot_product_attention, 1.0 / 3)
    operators = _rule._REGISTRY.operators
    finite = operators[aten.scaled_dot_product_attention]
    monkeypatch.setitem(operators, aten.scaled_dot_product_attention,
                        lambda op, p: Effect(finite(op, p).gains, ceiling=1e9))  # fmt: skip
    assert violations(case) > 0


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_sigmoid_without_its_value_at_zero(monkeypatch):
    """Output <= X/4 forgets that sigmoid(0) = 1/2 in every entry."""
    model = nn.Sequential(set_weights(nn.Linear(4, 4), torch.eye(4).tolist(), [0.0] * 4), nn.Sigmoid(),
                          nn.Linear(4, 1, bias=False))  # fmt: skip
    case = huber(model, (4,), 1, input_radius=0.5)
    caught(case, lambda: monkeypatch.setitem(_rule._REGISTRY.operators, aten.sigmoid, lambda op, p: Effect((0.25,))))


def test_a_bias_that_moves_no_output(monkeypatch):
    """Output <= cX forgets the bias."""
    model = nn.Sequential(set_weights(nn.Linear(1, 1), [[1.0]], [5.0]), nn.Linear(1, 1, bias=False))
    case = huber(model, (1,), 1)
    caught(case, lambda: monkeypatch.setattr(_dense, "bias_norm", lambda module: 0.0))
