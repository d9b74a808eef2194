"""The graph of a model: what becomes a node, and what is refused because a graph would not show it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import weightclip as wc
from weightclip.bounds import Effect
from weightclip.bounds._rule import _REGISTRY
from weightclip.certificate._graph import trace
from weightclip.errors import CertificationError


class Model(nn.Module):
    """A forward function over named members."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, value in members.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        """Calls the function with this module."""
        return self.function(self, x)


def kinds(model: nn.Module, *shape: int) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(n.op.path or n.op.name, n.op.kind, n.edges) for n in trace(model, torch.zeros(2, *shape)).nodes]


def refused(model: nn.Module, shape: tuple[int, ...] = (3,), said: str = "Fix") -> None:
    with pytest.raises(CertificationError, match=said):
        trace(model, torch.zeros(2, *shape))


def linear(n: int = 3) -> nn.Linear:
    return nn.Linear(n, n)


# -- what becomes a node ---------------------------------------------------------------------------------------------


def test_layers_are_single_nodes_named_by_path():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))
    assert kinds(model, 1, 3, 3) == [
        ("input", "input", ()), ("0", "Conv2d", (0,)), ("relu", "aten.relu.default", (1,)),
        ("flatten", "aten.flatten.using_ints", (2,)), ("3", "Linear", (3,)),
    ]  # fmt: skip


def test_a_model_that_is_a_layer():
    assert [k for _, k, _ in kinds(nn.Linear(3, 2), 3)] == ["input", "Linear"]


def test_a_layer_used_twice_is_two_nodes_of_one_layer():
    graph = trace(Model(lambda m, x: m.a(torch.tanh(m.a(x))) + m.a(x), a=linear()), torch.zeros(2, 3))
    assert [len(v) for v in graph.layers().values()] == [3]


def test_a_block_used_twice():
    graph = trace(Model(lambda m, x: m.b(m.b(x)), b=nn.Sequential(linear(), nn.ReLU())), torch.zeros(2, 3))
    assert {path: len(v) for path, v in graph.layers().items()} == {"b.0": 2}


def test_one_module_under_two_names_is_one_layer():
    layer = linear()
    graph = trace(Model(lambda m, x: m.b(m.a(x)), a=layer, b=layer), torch.zeros(2, 3))
    assert {path: len(v) for path, v in graph.layers().items()} == {"a": 2}


def test_a_residual_sum_has_two_edges_from_one_node():
    graph = trace(Model(lambda m, x: m.a(x + x), a=linear()), torch.zeros(2, 3))
    assert graph.nodes[1].edges == (0, 0)


def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.e = nn.Linear(7, 2), nn.Embedding(5, 4)

        def forward(self, x, ids):
            return self.a(torch.cat([x, self.e(ids)], 1))

    graph = trace(Two(), (torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)))
    assert [node.op.floating for node in graph.nodes if node.is_input] == [True, False]


def test_common_idioms_are_accepted():
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))

    def forward(m, x):
        h = m.conv(x)
        h = h.view(x.size(0), -1)
        y = m.fc(h)
        y += 1
        return F.relu(y, inplace=True)

    trace(Model(forward, conv=conv, fc=nn.Linear(8, 3)), torch.zeros(5, 1, 6, 6))


def test_in_place_residual():
    def forward(m, x):
        h = m.a(x)
        h += x
        return F.relu_(h)

    assert [e for _, _, e in kinds(Model(forward, a=linear()), 3)] == [(), (0,), (1, 0), (2,)]


def test_parameters_of_frozen_layers_need_a_rule_but_no_place():
    model = nn.Sequential(linear().requires_grad_(False), nn.ReLU(), linear())
    assert len(trace(model, torch.zeros(2, 3)).layers()) == 2


# -- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.BatchNorm1d(3), (3,)),
        (nn.SyncBatchNorm(3), (3, 2)),
        (nn.MultiheadAttention(4, 2), (3, 4)),
        (nn.LSTM(3, 3), (2, 3)),
        (nn.EmbeddingBag(4, 3), (2,)),
    ],
)
def test_modules_refused_by_name(module, shape):
    with pytest.raises(CertificationError, match=f"'1' \\({type(module).__name__}\\)"):
        trace(nn.Sequential(nn.Identity(), module), torch.zeros(2, *shape))


def test_parametrisations():
    refused(nn.Sequential(parametrizations.weight_norm(linear())), said="'0'.*is parametrised")
    refused(nn.Sequential(parametrizations.orthogonal(linear())), said="'0'.*is parametrised")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(linear())
    refused(nn.Sequential(old), said="'0'.*(hook|weight_norm)")
    refused(nn.Sequential(nn.utils.spectral_norm(linear())), said="'0'.*(hook|spectral_norm)")


def test_hooks_on_layers():
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        model = nn.Sequential(linear())
        getattr(model[0], register)(lambda *args: None)
        refused(model, said="'0' has a forward hook")


def test_hooks_on_containers_are_seen_in_the_graph():
    model = nn.Sequential(nn.Sequential(linear()))
    model[0].register_forward_hook(lambda m, i, o: 100 * o)
    assert [k for _, k, _ in kinds(model, 3)] == ["input", "Linear", "aten.mul.Tensor"]


# -- parameters ------------------------------------------------------------------------------------------------------


def test_parameters_outside_layers():
    refused(Model(lambda m, x: x * m.scale, scale=nn.Parameter(torch.ones(3))), said="'scale'.*mul.*outside a layer")
    refused(Model(lambda m, x: F.linear(x, m.a.weight), a=linear()), said="'a.weight'.*linear")
    refused(Model(lambda m, x: m.a.forward(x), a=linear()), said="'a.weight'.*linear")
    refused(Model(lambda m, x: m.a(x) + 0 * m.a.weight.sum(), a=linear()), said="'a.weight'")
    refused(Model(lambda m, x: x + m.bias, bias=nn.Parameter(torch.ones(3), requires_grad=False)), said="buffer")


def test_a_model_must_return_one_tensor_of_its_input():
    refused(Model(lambda m, x: (m.a(x), x), a=linear()), said="one tensor")
    refused(Model(lambda m, x: m.b, a=linear(), b=torch.ones(2, 3)), said="one tensor")


# -- what a graph does not show --------------------------------------------------------------------------------------


class Louder(torch.autograd.Function):
    """Identity forward, a thousand times the gradient backward: harmless in every exported graph."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, d):
        return 1000 * d


class LouderModule(nn.Module):
    """The same in a module, for which a rule can be registered."""

    def forward(self, x):
        return Louder.apply(x)


def test_a_module_with_a_rule_may_have_one():
    before = dict(_REGISTRY.modules)
    try:
        wc.register_rule(LouderModule, lambda op, p: Effect((1000.0,)))
        assert [k for _, k, _ in kinds(nn.Sequential(linear(), LouderModule()), 3)] == [
            "input",
            "Linear",
            "LouderModule",
        ]
    finally:
        _REGISTRY.modules = before


def _through_a_slice(m, x):
    y = m.a(x)
    y[:, :1].mul_(100.0)
    return y


def _through_a_base(m, x):
    y = m.a(x)
    seen = y.view(-1, 3, 1)
    y.mul_(100.0)
    return seen.flatten(1)


def _through_a_chunk(m, x):
    y = m.a(x)
    first, second = y.chunk(2, 1)
    first.add_(100.0)
    return y


def _through_idle_dropout(m, x):
    y = m.a(x)
    z = F.dropout(y, 0.5, training=False)
    z.mul_(100.0)
    return y + z


@pytest.mark.parametrize("forward", [_through_a_slice, _through_a_base, _through_a_chunk])
def test_writes_under_another_name(forward):
    refused(Model(forward, a=linear()), said="writes in place|modified inplace")


def test_writes_through_a_dropout_that_does_nothing():
    """Refused, or (where torch, as 2.15 does, shows in the graph that both are one tensor) certified as computed."""

    def sensitivity(forward):
        certificate = wc.certify(Model(forward, a=layer), nn.L1Loss(), input_radius=1.0, example=torch.zeros(2, 3))
        return certificate.sensitivities["a"]

    layer = linear()
    computed = sensitivity(lambda m, x: 200.0 * m.a(x))
    try:
        found = sensitivity(_through_idle_dropout)
    except CertificationError as error:
        assert "writes in place" in str(error)
    else:
        assert found >= computed * (1 - 1e-6)


def test_assignments_into_slices():
    def forward(m, x):
        y = m.a(x)
        y[:, 0] = 100 * y[:, 1]
        return y

    refused(Model(forward, a=linear()))


def test_state_that_changes_in_a_pass():
    def forward(m, x):
        y = m.a(x) * m.scale
        m.scale.mul_(2)
        return y

    refused(Model(forward, a=linear(), scale=torch.ones(3)), said="'b_scale' in forward")


@pytest.mark.parametrize("factor", [lambda x: x.shape[0], lambda x: x.size(0) + 1, lambda x: x.shape[0] / 3])
def test_the_batch_size_never_enters_values(factor):
    refused(Model(lambda m, x: m.a(x) * factor(x), a=linear()), said="number of records")


def test_control_flow():
    refused(Model(lambda m, x: m.a(x) if x.sum() > 0 else m.a(2 * x), a=linear()), said="data-dependent")
    refused(Model(lambda m, x: m.a(x) if x.shape[0] > 4 else m.a(2 * x), a=linear()), said="graph")
    refused(Model(lambda m, x: m.a(x[:2]), a=linear()), said="record|graph")


def test_no_grad_inside_a_model():
    def forward(m, x):
        with torch.no_grad():
            h = torch.tanh(x)
        return m.a(h + x)

    refused(Model(forward, a=linear()), said="has no rule|graph")


def test_casts_that_keep_no_norm():
    refused(Model(lambda m, x: m.a((x > 0).float()), a=linear()), said="gt|bool")
    refused(Model(lambda m, x: m.a(x.int().float()), a=linear()), said="int32")
    refused(Model(lambda m, x: m.a(x.bfloat16().float()), a=linear()), said="autocast")


def test_tokens_may_be_shifted():
    model = Model(lambda m, ids: m.a(m.e(ids + m.offset).flatten(1)), e=nn.Embedding(9, 2), a=nn.Linear(4, 2),
                  offset=torch.tensor([0, 4]))  # fmt: skip
    graph = trace(model, torch.zeros(2, 2, dtype=torch.long))
    assert [n.op.floating for n in graph.nodes][:2] == [False, False]


def test_inputs_need_a_record_dimension():
    with pytest.raises(CertificationError, match="record dimension"):
        trace(linear(), torch.tensor(1.0))
