"""Ways of splitting a model over processes under which no process sees a whole record: refused by name."""

from __future__ import annotations

from torch import nn

from weightclip._torch import sharded_groups
from weightclip.errors import ContractError

_WHOLE = "give every rank the whole plain model; the engine divides the records of each draw between ranks."


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
