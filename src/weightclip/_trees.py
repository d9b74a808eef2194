"""Tensors inside what models take and return: tuples, lists, mappings, dataclasses, Hugging Face's outputs and batches.

``torch.utils._pytree`` knows only what was registered with it, and a tensor that is overlooked passes a door unseen.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


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


def _is_record(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)
