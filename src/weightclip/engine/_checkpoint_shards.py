"""Checkpoints of a sharded model: every rank writes its rows (torch.distributed.checkpoint), the first one commits."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weightclip.engine._checkpoint_checks import check_ledger
from weightclip.errors import ContractError, WeightclipError

if TYPE_CHECKING:
    from weightclip.engine._engine import PrivacyEngine

_METADATA = ".metadata"
_WORDS = 4  # of 64 bits in a digest
_KNOWN = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "torch": {"Size", "device"} | {str(kind)[6:] for kind in vars(torch).values() if isinstance(kind, torch.dtype)},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


def write_shards(engine: PrivacyEngine, folder: Path, tensors: dict[str, Tensor]) -> list[str]:
    """Every rank's rows, on disk when this returns on any rank; the digests of their files by rank."""
    dcp = _dcp()
    ranks = engine.ranks
    with ranks.together(), _quiet():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder, sync_files=True), no_dist=ranks.count == 1)
        mine = torch.from_numpy(np.frombuffer(_digest(folder, ranks.rank), dtype="<i8").astype(np.int64))
        found = ranks.gather(mine).reshape(-1, _WORDS)
    if ranks.first:
        sync_file(folder / _METADATA)
    return [row.numpy().astype("<i8").tobytes().hex() for row in found]


def read_shards(engine: PrivacyEngine, folder: Path, book: dict[str, Any]) -> dict[str, Tensor]:
    """What :func:`write_shards` wrote, into rows of this engine's parameters; all ranks call it.

    Formal guarantees:
        Every file is the one that was written (by its digest) and no code of the file runs: of the pickled index only
        plain descriptions of tensors are accepted.
    """
    dcp = _dcp()
    ranks, shards = engine.ranks, engine.shards
    assert shards is not None
    wanted = ranks.tell(lambda: _described(folder))
    problem: Exception | None = None
    tensors: dict[str, Tensor] = {}
    try:
        for number in range(ranks.rank, len(book["shards"]), ranks.count):
            check_shard(folder, number, book)
        tensors = _rooms(engine, wanted)
    except (OSError, ValueError, WeightclipError) as error:
        problem = error
    _all_well(engine, folder, problem)
    with ranks.together(), _quiet():
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=ranks.count == 1)
    try:
        check_ledger(book["ledger"], {k: _local(v) for k, v in tensors.items()})
    except ValueError as error:
        problem = error
    _all_well(engine, folder, problem)
    return tensors


def read_whole(folder: Path, book: dict[str, Any]) -> dict[str, Tensor]:
    """The same for a model that is not sharded: whole tensors, on the process that asks."""
    dcp = _dcp()
    for number in range(len(book["shards"])):
        check_shard(folder, number, book)
    tensors = {name: torch.empty(size, dtype=kind) for name, size, kind in _described(folder)}
    with _quiet():
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def check_shard(folder: Path, number: int, book: dict[str, Any]) -> None:
    """The files of one rank must be those that were written."""
    if _digest(folder, number).hex() != book["shards"][number]:
        raise ValueError("its files were changed or do not belong together")


def remove_others(target: Path, kept: str) -> None:
    """Folders of checkpoints that were replaced, or never committed."""
    for old in target.glob("weights-*"):
        if old.is_dir() and old.name != kept:
            shutil.rmtree(old, ignore_errors=True)


def _all_well(engine: PrivacyEngine, folder: Path, problem: Exception | None) -> None:
    assert engine.shards is not None
    if engine.shards.everywhere(problem is None):
        return
    reason = "another rank could not" if problem is None else problem
    raise WeightclipError(f"cannot read the checkpoint '{folder.parent}': {reason}") from problem


def _rooms(engine: PrivacyEngine, wanted: list[tuple[str, tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Tensors to be filled: sharded as this engine's parameters are."""
    assert engine.model is not None
    here = {f"model.{name}": value.detach() for name, value in engine.model.state_dict().items()}
    trained = [p.detach() for group in engine.optimizer.param_groups for p in group["params"]]
    found: dict[str, Tensor] = {}
    for name, size, kind in wanted:
        like = here.get(name)
        if name.startswith("optimizer.state."):
            number = name.split(".")[2]
            like = trained[int(number)] if number.isdigit() and int(number) < len(trained) else None
        elif name.startswith("model.") and (like is None or tuple(like.shape) != size):
            raise ContractError("the checkpoint holds another model: its parameters have other names or shapes.")
        fits = like is not None and tuple(like.shape) == size
        found[name] = torch.empty_like(like, dtype=kind) if fits else torch.empty(size, dtype=kind)  # type: ignore[arg-type]
    return found


def _described(folder: Path) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Names, shapes and types of the tensors of a checkpoint."""
    metadata = _Descriptions(io.BytesIO((folder / _METADATA).read_bytes())).load()
    return [(k, tuple(v.size), v.properties.dtype) for k, v in metadata.state_dict_metadata.items()]


class _Descriptions(pickle.Unpickler):
    """Loads descriptions of tensors; anything else that a pickle could make or call is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if name.split(".")[0] not in _KNOWN.get(module, ()):
            raise ValueError(f"its index names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


def _local(value: Any) -> Tensor:
    """This rank's rows of a sharded tensor; others as they are."""
    return value.to_local() if hasattr(value, "to_local") else value


def _dcp() -> Any:
    """Imported when it is needed: it brings much of torch.distributed with it."""
    import torch.distributed.checkpoint as dcp

    return dcp


def _digest(folder: Path, rank: int) -> bytes:
    """Of the files that one rank has written; the first one's hold the index."""
    digest = hashlib.blake2b(digest_size=8 * _WORDS)
    for path in [*sorted(folder.glob(f"__{rank}_*")), *([folder / _METADATA] if rank == 0 else [])]:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.digest()


def sync_file(path: Path) -> None:
    """What was written to a file is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings about how it writes."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
