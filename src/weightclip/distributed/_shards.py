"""Parameters that ``fully_shard`` has dealt out to the processes: who owns which rows, and how sums come to owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._torch import sharded_groups
from weightclip.distributed._ranks import Ranks
from weightclip.errors import ContractError

_AT_ONCE = 1 << 17  # numbers for each owner in one message
_WHOLE = "give every rank the whole plain model; the engine divides the records of each draw between ranks."
_PLAIN = "call fully_shard(part) for parts and fully_shard(model) last, with its defaults."


class Shards:
    """The sharded parameters of a model.

    Attributes:
        twins: By the id of a sharded parameter: the whole one that stands in its place while its layer runs.

    Formal guarantees:
        fully_shard's own reduction of gradients is switched off: what autograd brings to a whole parameter stays there,
        and :meth:`refuse_gradients` finds it. A row of a parameter belongs to one rank, so that a sum that was reduced
        to its owner is released by that rank alone, once.
    """

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        self.ranks, self.groups = ranks, sharded_groups(model)
        for group in self.groups:
            _refuse_other_policies(group, ranks)
        self.rest()
        self.twins: dict[int, Tensor] = {}
        for group in self.groups:  # one after the other: the whole model may not fit
            group.part.unshard()
            self.twins.update({id(p): twin for p, twin in group.pairs()})
            group.part.reshard()
        for name, p in model.named_parameters():
            if p.requires_grad and id(p) not in self.twins:
                raise ContractError(f"parameter '{name}' is trained and not sharded, others are: {_PLAIN}")

    def sync(self, on: bool) -> None:
        """Whether fully_shard averages gradients itself: not while an engine trains the model."""
        for group in self.groups:
            group.part.set_requires_gradient_sync(on, recurse=False)

    def rest(self) -> None:
        """Every parameter is its owner's part again: a pass without a backward leaves those of the root whole."""
        for group in self.groups:
            group.part.reshard()

    def of(self, parameters: Sequence[nn.Parameter]) -> list[Rows]:
        """The rows of each parameter that this rank owns."""
        if not all(hasattr(p, "to_local") for p in parameters):
            raise ContractError("a forward pass of the sharded model failed: run model(x) by itself to see how.")
        return [Rows(self.ranks, p) for p in parameters]

    def everywhere(self, holds: bool) -> bool:
        """Whether something holds on every rank."""
        return not bool(self.ranks.largest(torch.tensor([float(not holds)])))

    def refuse_gradients(self) -> None:
        """Gradients that autograd brought to whole parameters belong to no private loss."""
        for group in self.groups:
            if group.gradients():
                group.forget()
                raise ContractError(
                    "a term besides the private loss reaches the model's parameters, and its gradient would not be "
                    "private: remove it (for an L2 penalty use the optimiser's weight_decay)."
                )


class Rows:
    """The rows of one parameter, of which this rank owns a part."""

    def __init__(self, ranks: Ranks, parameter: Any) -> None:
        self.ranks, self.parameter = ranks, parameter
        self.shape = tuple(parameter.shape)
        rows, self.width = self.shape[0], parameter.numel() // max(1, self.shape[0])
        self.chunk = -(-rows // ranks.count)
        self.begin = min(ranks.rank * self.chunk, rows)
        self.local = tuple(parameter.to_local().shape)

    @property
    def start(self) -> int:
        """Where this rank's part begins among the parameter's entries."""
        return self.begin * self.width

    @property
    def size(self) -> int:
        """How many entries this rank owns."""
        return self.local[0] * self.width

    def sum_to_owner(self, total: Tensor | None, kind: torch.dtype, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum over all ranks of what each has for the whole parameter, converted: the part that this rank owns.

        It is converted and sent some rows of every owner at a time, so that what is wide is never the whole parameter.
        """
        device, world = self.parameter.device, self.ranks.count
        mine = torch.empty((self.chunk, self.width), dtype=kind, device=device)
        flat = None if total is None else total.reshape(self.shape[0], self.width)
        rows = max(1, _AT_ONCE // max(1, self.width))
        for begin in range(0, self.chunk, rows):
            count = min(rows, self.chunk - begin)
            sent = torch.zeros((world, count, self.width), dtype=kind, device=device)
            for owner in range(world if flat is not None else 0):
                first = owner * self.chunk + begin
                part = flat[first : first + count]  # type: ignore[index] # less than count where the parameter ends
                sent[owner, : part.shape[0]] = convert(part)
            mine[begin : begin + count] = self.ranks.sum_to_owners(sent.reshape(world * count, self.width))
        return mine[: self.local[0]].reshape(self.local)

    def whole(self, part: Tensor) -> Tensor:
        """All ranks' parts, one behind the other, on every rank."""
        sent = part.new_zeros((self.chunk, self.width))
        sent[: self.local[0]] = part.reshape(self.local[0], self.width)
        return self.ranks.gather(sent)[: self.shape[0]].reshape(self.shape)

    def mine(self) -> Tensor:
        """This rank's part of the parameter."""
        return self.parameter.detach().to_local()

    def gradient(self, part: Tensor) -> Tensor:
        """What the optimiser takes for the gradient of the parameter, of which this is our part."""
        from torch.distributed.tensor import DTensor

        p = self.parameter
        return DTensor.from_local(
            part.reshape(self.local).to(p.dtype), p.device_mesh, p.placements, run_check=False, shape=p.shape,
            stride=p.stride(),
        )  # fmt: skip


def refuse_parallel(model: nn.Module) -> None:
    """Raise for a model that is split over processes.

    Tensor, sequence and context parallelism split a record's factors, so that no rank knows the norm it has to limit;
    a pipeline splits the layers, and no rank knows the joint cap's (SOUNDNESS Theorem 32). Parameters under
    ``fully_shard`` are whole while their layer runs, and welcome; the older wrapper flattens them.
    """
    sharded = {id(p) for group in sharded_groups(model) for p, _ in group.pairs()}
    for name, part in model.named_modules():
        where, kind = type(part).__module__, type(part).__name__
        if where.startswith("torch.distributed.pipelining"):
            raise ContractError(f"the model is a pipeline ('{name}', {kind}), which splits its layers: {_WHOLE}")
        if kind == "FullyShardedDataParallel":
            raise ContractError(f"'{name}' is wrapped in {kind}, which flattens parameters: use fully_shard instead.")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") and id(parameter) not in sharded:  # a DTensor
            raise ContractError(
                f"parameter '{name}' is distributed over processes (tensor, sequence or context parallelism), which "
                f"splits a record's factors: {_WHOLE}"
            )


def find_shards(ranks: Ranks, model: nn.Module) -> Shards | None:
    """The shards of a model under ``fully_shard``; None if it is whole on every rank. Other splits are refused."""
    refuse_parallel(model)
    return Shards(ranks, model) if sharded_groups(model) else None


def _refuse_other_policies(group: Any, ranks: Ranks) -> None:
    """What was not thought through: copies of shards, other ways to cut, casts and offloading by fully_shard."""
    if group.mesh.ndim != 1 or group.mesh.size() != ranks.count:
        raise ContractError(f"fully_shard got a mesh {tuple(group.mesh.shape)} on {ranks.count} ranks: {_PLAIN}")
    if group.cast:
        raise ContractError("fully_shard(mp_policy=...) casts parameters behind the engine: use torch.autocast.")
    if group.offloaded:
        raise ContractError("fully_shard(offload_policy=...) is not supported: leave it out.")
    for p, _ in group.pairs():
        if not all(place.is_shard(0) for place in p.placements):
            raise ContractError(f"parameters must be sharded by rows (dimension 0): {_PLAIN}")
