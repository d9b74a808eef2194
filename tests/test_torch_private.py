"""Private symbols of torch live in ``weightclip/_torch.py`` alone, and do there what their names say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from weightclip import _torch as ours

SOURCE = Path(ours.__file__).parent
# names with an underscore that torch's objects carry, and that no class of ours has under the same name
ATTRIBUTES = {
    "_backward_hooks", "_backward_pre_hooks", "_cdata", "_execution_engine", "_forward_hooks", "_forward_pre_hooks",
    "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "_post_accumulate_grad_hooks", "_version",
}  # fmt: skip
ALLOWED = {
    "torch.ops.aten._unsafe_view": "an operator's name in an exported graph; a missing one fails at import",
    "torch.ops.aten._to_copy": "the same",
    "torch.ops.aten._softmax": "the same",
    "torch.ops.aten._log_softmax": "the same",
}


def dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    """``torch.a._b`` of an attribute, with what imported and assigned names stand for; None if it is none of torch."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, names)):
        return f"{base}.{node.attr}"
    return None


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


def private_uses(source: str) -> list[str]:
    """Every private symbol of torch that a file reaches for, as ``line: symbol``."""
    tree, names, found = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    found += [(node.lineno, alias.name)] if is_private(alias.name) else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found += [(node.lineno, names[alias.asname or alias.name])]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (p := dotted(node.value, names)):
            names[node.targets[0].id] = p
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = dotted(node, names)
            if path is None and node.attr in ATTRIBUTES:
                path = f"_.{node.attr}"
            found += [(node.lineno, path)] if path else []
    return [f"{line}: {path}" for line, path in sorted(set(found)) if is_private(path) and path not in ALLOWED]


def test_private_symbols_are_in_one_file():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name != "_torch.py" and (uses := private_uses(path.read_text())):
            found[name] = uses
    assert not found, f"put these behind a function of weightclip/_torch.py: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_norm([])",
        "import torch as t\nt._C._current_graph_task_id()",
        "from torch._utils import _unflatten_dense_tensors",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._pytree import tree_map",
        "from torch import nn\nisinstance(m, nn.modules.conv._ConvNd)",
        "import torch\naten = torch.ops.aten\naten._fused_sdp",
        "import torch.utils._pytree",
        "def f(tensor):\n    return tensor._version",
    ],
)
def test_the_search_finds(source):
    assert private_uses(source)


def test_the_search_leaves_alone_what_is_public():
    assert not private_uses(
        "import torch\nfrom torch import nn\nfrom weightclip._a import _b\nclass A:\n    def f(self):\n"
        "        self._x, torch.__version__, nn.Linear, self._x._y, torch.ops.aten._softmax"
    )


# -- what each function promises, on the torch at hand ---------------------------------------------------------------


def test_many_tensors_at_once():
    a, b = [torch.tensor([3.0, 4.0]), torch.ones(2, 2)], [torch.ones(2), torch.zeros(2, 2)]
    assert [float(n) for n in ours.norms_of_all(a)] == [5.0, 2.0]
    ours.add_all_(a, b)
    ours.multiply_all_(a, [2.0, 3.0])
    assert a[0].tolist() == [8.0, 10.0] and a[1].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    ours.multiply_all_(a, [torch.tensor(0.5), torch.tensor(0.0)])
    ours.lerp_all_(a, b, 0.5)
    assert a[0].tolist() == [2.5, 3.0] and float(a[1].sum()) == 0.0
    ours.copy_all_(a, b)
    assert torch.equal(a[0], b[0]) and a[0] is not b[0]


def test_memory():
    flat = torch.arange(6.0)
    parts = ours.split_like(flat, [torch.zeros(2), torch.zeros(2, 2)])
    assert [p.tolist() for p in parts] == [[0.0, 1.0], [[2.0, 3.0], [4.0, 5.0]]]
    before = ours.version_of(flat)
    parts[1].mul_(0.0)  # a write into the flat tensor
    assert float(flat.sum()) == 1.0 and ours.version_of(flat) > before
    assert ours.same_memory(flat, parts[0]) and not ours.same_memory(flat, flat.clone())
    renamed = ours.reshaped_copy_of(flat)
    assert renamed.data_ptr() == flat.data_ptr() and not renamed._is_view()


def test_int8_product():
    a, b = (torch.randint(-128, 128, (32, 32), dtype=torch.int8) for _ in range(2))
    assert torch.equal(ours.int8_product(a, b), (a.long() @ b.long()).int())


class Twice(torch.autograd.Function):
    """2 x, and notes of its backward pass."""

    @staticmethod
    def forward(ctx, x):
        """Doubles."""
        return 2 * x

    @staticmethod
    def backward(ctx, *grads):
        """Doubles."""
        return 2 * grads[0]


def test_functions_may_be_applied_directly():
    x = torch.ones(3, requires_grad=True)
    for y in (Twice.apply(x), ours.apply_directly(Twice, x)):
        y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * 3


def test_transforms():
    seen = []
    torch.func.vmap(lambda x: seen.append(ours.transforms_active()) or x)(torch.ones(2))
    assert seen == [True] and not ours.transforms_active() and not ours.data_parallel_active()


def test_hooks_are_seen():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    assert not ours.forward_hooks(layer) and ours.optimizer_hooks(optimizer) == (0, 0, 0, 0)
    layer.register_forward_hook(print)
    layer.register_forward_pre_hook(len)
    assert ours.forward_hooks(layer) == [print, len]
    ours.drop_forward_hooks(layer, lambda hook: hook is print)
    assert ours.forward_hooks(layer) == [len]
    optimizer.register_step_pre_hook(lambda *a: None)
    optimizer.register_step_post_hook(lambda *a: None)
    assert ours.optimizer_hooks(optimizer) == (0, 0, 1, 1)
