"""Common ground on torch: every private symbol of it that weightclip uses, behind names of our own; trees of tensors.

Torch may move or change what begins with an underscore in any release. Here is the one place to look when one does;
``tests/test_torch_private.py`` refuses such access elsewhere, ``make test-torch TORCH=x.y`` runs the core tests with
another release. All of this works with the minimum that ``pyproject.toml`` declares and with the newest release known.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules import module as _module_file
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.conv import _ConvTransposeNd as ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [  # of what comes from torch as it is
    "AnyBatchNorm", "AnyDropout", "AnyInstanceNorm", "ConvNd", "ConvTransposeNd", "DispatchMode", "SpectralNorm",
    "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten",
]  # fmt: skip

_hooks = cast(Any, _module_file)
_torch = cast(Any, torch)  # type stubs leave private names out


# one launch for many tensors


def norms_of_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, as scalars on their device."""
    return list(_torch._foreach_norm(list(tensors)))


def add_all_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """``t += o`` for every pair."""
    _torch._foreach_add_(list(tensors), list(others))


def multiply_all_(tensors: Sequence[Tensor], factors: Sequence[Any]) -> None:
    """``t *= f`` for every pair; the factors are all numbers or all tensors without dimensions."""
    _torch._foreach_mul_(list(tensors), list(factors))


def copy_all_(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Overwrite every tensor by its source."""
    _torch._foreach_copy_(list(tensors), list(sources))


def lerp_all_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """``t += weight * (end - t)`` for every pair."""
    _torch._foreach_lerp_(list(tensors), list(ends), weight)


# tensors and their memory


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat``, one behind the other, in the shapes of ``tensors``."""
    return list(_unflatten_dense_tensors(flat, list(tensors)))


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of two int8 matrices, exactly, as int32."""
    return _torch._int_mm(a, b)


def reshaped_copy_of(value: Tensor) -> Tensor:
    """``value`` under a new name that autograd does not take for a view of it; the memory is the same."""
    return torch.ops.aten._unsafe_view(value, value.shape)


version_of: Callable[[Tensor], int] = operator.attrgetter("_version")  # how often a tensor was written in place


def storage_address(storage: torch.UntypedStorage) -> int:
    """What tells a storage from every other that lives at the same time."""
    return storage._cdata


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return storage_address(a.untyped_storage()) == storage_address(b.untyped_storage())


# tensors inside what models take and return: tuples, lists, mappings, dataclasses, Hugging Face's outputs and batches.
# torch.utils._pytree knows only what was registered with it, and a tensor that is overlooked passes a door unseen


def map_tensors(act: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same tree with ``act`` of every tensor in its place; what holds no tensor is left as it is."""
    if isinstance(tree, Tensor):
        return act(tree)
    if isinstance(tree, Mapping):
        found = {key: map_tensors(act, value) for key, value in tree.items()}
        if type(tree) is dict:
            return found
        new: Any = copy.copy(tree)  # an output or a batch of Hugging Face's: attributes follow its items
        for key, value in found.items():
            if value is not tree[key]:
                new[key] = value
        return new
    if isinstance(tree, (tuple, list)):
        parts = [map_tensors(act, value) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if _is_record(tree):
        new = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(new, field.name, map_tensors(act, getattr(tree, field.name)))
        return new
    return tree


def leaves_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, leaf) of everything in the tree that holds nothing else, in the order of :func:`map_tensors`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves_of(value, (*path, key))
    elif isinstance(tree, (tuple, list)):
        for i, value in enumerate(tree):
            yield from leaves_of(value, (*path, i))
    elif _is_record(tree):
        for field in dataclasses.fields(tree):
            yield from leaves_of(getattr(tree, field.name), (*path, field.name))
    else:
        yield path, tree


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of the tree, in the order of :func:`map_tensors`."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for _, leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def inputs_of(args: Any, kwargs: Any) -> Sequence[Tensor]:
    """All tensors that a module is called with."""
    usual = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
    return args if usual else tensors_of((args, kwargs))


def _is_record(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


# passes


# whether code runs inside ``torch.func`` (grad, vmap, ...)
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def apply_directly(function: type[torch.autograd.Function], *args: Any) -> Any:
    """As ``function.apply(*args)`` outside of ``torch.func``, without a look at each argument for remains of it."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def gradients_at(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As ``torch.autograd.grad(outputs, inputs, given, allow_unused=True)``, without a look at each argument."""
    return _engine_run_backward(tuple(outputs), tuple(given), False, False, tuple(inputs), True, accumulate_grad=False)


def without_overrides() -> Any:
    """Inside, subclasses of Tensor are taken for plain tensors: their ``__torch_function__`` is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def modes_active() -> bool:
    """Whether a mode sees every operation, or a hook every tensor that is kept for backward: they may do anything."""
    return (
        torch._C._is_torch_function_mode_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def data_parallel_active() -> bool:
    """Whether code runs inside the forward of a ``DistributedDataParallel`` model."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


# what torch.nn.utils.parametrizations.weight_norm computes with; vmap has no rule for it
weight_norm: Callable[..., Tensor] = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage]


# tables of hooks


def _own(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _of_all() -> list[dict[int, Any]]:
    return [getattr(_hooks, f"_global_{when}_hooks") for when in ("forward", "forward_pre", "backward", "backward_pre")]


def forward_hooks(module: nn.Module) -> list[Any]:
    """Hooks that run before or after the module's forward."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def hooked(module: nn.Module) -> bool:
    """Whether any hook runs around the module's forward or backward, its own or one of all modules."""
    return any(_own(module)) or any(_of_all())


def code_of(modules: Sequence[nn.Module]) -> list[Any]:
    """What runs when any of the modules is called: hooks of all modules, then of each its class's forward and its own,
    and its hooks; ``None`` between tables."""
    found: list[Any] = []
    for table in _of_all():
        found += [None, *table.values()] if table else [None]
    for module in modules:
        found += type(module).forward, module.__dict__.get("forward")
        for table in _own(module):
            found += [None, *table.values()] if table else [None]
    return found


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def drop_forward_hooks(module: nn.Module, which: Callable[[Any], bool]) -> None:
    """Remove the chosen ones of the hooks that run before or after the module's forward."""
    for table in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in table.items() if which(hook)]:
            del table[key]


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> tuple[int, int, int, int]:
    """How many hooks run around a step: of all optimisers before and after, of this one before and after."""
    own: Any = optimizer
    tables = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks,
              own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks)  # fmt: skip
    before, after, own_before, own_after = [len(table) for table in tables]
    return before, after, own_before, own_after


# parameters under fully_shard


class ShardedGroup:
    """Parameters that ``fully_shard`` gathers and frees together."""

    def __init__(self, part: Any, group: Any) -> None:
        self.part, self._group = part, group
        self.mesh = group.mesh_info.mesh
        self.cast = group.mp_policy.param_dtype is not None or group.mp_policy.output_dtype is not None
        self.offloaded = type(group.offload_policy).__name__ != "OffloadPolicy"

    def pairs(self) -> list[tuple[Any, Any]]:
        """Every sharded parameter, and the whole one that takes its place (None before it was gathered once)."""
        return [(p.sharded_param, getattr(p, "_unsharded_param", None)) for p in self._group.fsdp_params]

    def gradients(self) -> bool:
        """Whether autograd has brought a gradient to a whole parameter."""
        return any(
            p.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
            for p, (_, whole) in zip(self._group.fsdp_params, self.pairs(), strict=True)
        )

    def forget(self) -> None:
        """Drop such gradients."""
        for p, (_, whole) in zip(self._group.fsdp_params, self.pairs(), strict=True):
            p.unsharded_accumulated_grad = None
            if whole is not None:
                whole.grad = None


def sharded_groups(model: nn.Module) -> list[ShardedGroup]:
    """Groups of parameters under ``fully_shard``, the root's first."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # nobody has called fully_shard without importing it
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    found: list[ShardedGroup] = []
    for part in model.modules():
        if isinstance(part, fsdp.FSDPModule):
            state: Any = cast(Any, part)._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            found += [ShardedGroup(part, group) for group in groups if group is not None]
    return found
