"""What the processes of a run compare, before its first step and before every release, and how they make one.

SOUNDNESS Theorem 32 proves it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from weightclip.certificate import Bounds, OpenPlan, Plan
from weightclip.distributed import Ranks, Shards
from weightclip.engine._checkpoint import feed
from weightclip.engine._digest import settings_digest, tensors_digest
from weightclip.errors import ContractError
from weightclip.noise import Release, ShardedRelease
from weightclip.sampling import KeyedRecords, Wanted

if TYPE_CHECKING:
    from weightclip.engine._engine import PrivacyEngine
    from weightclip.engine._step import Training

_LOOKED_AT = 256  # records of the data set that ranks compare


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


@torch.no_grad()
def share_weights(ranks: Ranks, model: nn.Module, seeded: bool) -> None:
    """Every rank starts from rank 0's parameters and buffers, whatever its own seed made of them."""
    state = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, t.dtype, tuple(t.shape), t.requires_grad) for name, t in state]
    ranks.agree(lambda: {"the model": repr(shapes).encode(), "whether generator= is given": str(seeded).encode()})
    # rows of a sharded parameter have one owner, whose they are
    ranks.spread([t.detach() for _, t in state if not hasattr(t, "device_mesh")])


def agree_on_run(engine: PrivacyEngine) -> None:
    """All settings, seeds and data are the same on every rank.

    Which promise needs it: a record of a draw is computed by whichever rank its place in the draw falls to. With other
    data on some rank one more record would change which others are in the sum, not only where.
    """
    engine.ranks.agree(
        lambda: {
            "the seed": engine.streams.key("weightclip/agree"),
            "settings": settings_digest(engine),
            "the data set (give every rank the whole of it, in one order)": _glance(engine),
        }
    )


def _glance(engine: PrivacyEngine) -> bytes:
    """A digest of the data set's length and of some records, read with generators set to the same state.

    The first and the last, and others that the run's key chooses; of a table of tensors all records count.
    """
    dataset: Any = engine.loader.dataset
    n, digest = len(dataset), hashlib.blake2b(key=engine.streams.key("weightclip/glance"), digest_size=32)
    digest.update(str(n).encode())
    if isinstance(dataset, TensorDataset):
        digest.update(_checksum(dataset.tensors))
    drawn = engine.streams.numpy("weightclip/looked-at").integers(0, max(1, n), _LOOKED_AT)
    places = sorted({0, n - 1, *drawn.tolist()}) if n > _LOOKED_AT else list(range(n))
    feed(digest, KeyedRecords(dataset).__getitems__(Wanted(places, None, None, bytes(32), 0)).records)
    return digest.digest()


def agree_on_step(training: Training) -> None:
    """The number of the step, the weights, the units of the sums and the modes are the same on every rank."""
    engine, exact = training.engine, training.release.exact
    held = [t for t in training.held if not hasattr(t, "device_mesh")]
    engine.ranks.check()
    engine.ranks.agree(
        lambda: {
            "the number of the step": str(engine.steps).encode(),
            "the weights": _checksum(held),
            "the grid of sums": json.dumps(None if exact is None else exact.units).encode(),
            "the order of sums": training.release.order,
        }
    )


def release_together(t: Training, step: int) -> None:
    """Sums of all processes, then noise: made once, by the first, whose release all of them get.

    Noise that every process made for itself would have to be the same to the last bit: were it not, one sum would
    be out under two noises. It is scaled for the largest sensitivities, should a process have seen other shapes.
    """
    ranks, release = t.engine.ranks, t.release
    counts, limits = ([], []) if t.quantiles is None else (t.quantiles.counts(), t.quantiles.limits())
    with ranks.together("optimizer.step()"):
        values = t.sensitivity.values
        if ranks.count > 1:
            values = ranks.largest(values)
            for count in counts:
                ranks.sum_to_first(count)
            release.exchange(ranks.sum_to_first)
        if t.engine.shards is not None:
            streams = t.engine.streams.for_release(step, t.content).of_first(ranks.tell)
            release.release(values, streams, step)
            t.adapt(streams, step)
        elif ranks.first:
            t.release_sum(step, values)
        else:
            release.receive()
            t.adapt(None, step)
        ranks.spread(limits)


@torch.no_grad()
def _checksum(tensors: Sequence[Tensor]) -> bytes:
    """Tells tensors apart that differ in any bit, or in their order; on a CPU as cheap as a sum of all words."""
    return tensors_digest(tensors, b"weightclip/agree")
