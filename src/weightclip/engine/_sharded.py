"""What is different for a model under ``fully_shard``: refusals, and the release by owners."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from weightclip.certificate import Bounds, OpenPlan, Plan
from weightclip.distributed import Rows, Shards
from weightclip.errors import ContractError
from weightclip.noise import Release, ShardedRelease


def refuse_whole_weights(shards: Shards | None, bounds: Bounds, is_open: bool) -> None:
    """Certified norms and ClipWeights look at whole weights, which no rank has at rest."""
    if shards is not None and (not is_open or bounds.weight_norm is not None):
        raise ContractError(
            "bounds from weights (weight_norm, input_radius, limit=Certified(), mechanism) need whole weights, which "
            "fully_shard deals out: use Bounds() (the default), layer_cap, or layer_radius with cotangent_radius."
        )


def make_release(shards: Shards | None, plan: Plan | OpenPlan, *args: Any, **named: Any) -> Release:
    """The release of a model that is whole on every rank, or of one whose rows have owners."""
    if shards is None:
        return Release(plan, *args, **named)
    shards.rest()
    release = ShardedRelease(plan, *args, owned=shards.of, everywhere=shards.everywhere, **named)
    release.leaves = [shards.twins[id(p)] for p in release.parameters]
    return release


def whole_state(shards: Shards | None, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, in their order, each as a whole; all ranks ask together."""
    for name, t in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        if shards is not None and id(t) in shards.twins:
            rows = Rows(shards.ranks, t)
            yield name, rows.whole(rows.mine())
        else:
            yield name, t


def unsharded_text(model: nn.Module) -> str:
    """The model in words, the same whether it is sharded or not."""
    return re.sub(r"\bFSDP(?=\w+\()", "", repr(model))
