"""Save and resume: weights, optimiser and ledger in one folder (safetensors + JSON), replaced in one atomic step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import secrets
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from weightclip.engine._checkpoint_checks import alone, check_ledger
from weightclip.engine._checkpoint_shards import read_shards, read_whole, remove_others, sync_file, write_shards
from weightclip.errors import ContractError, UncountedReleases, WeightclipError
from weightclip.noise import Streams

if TYPE_CHECKING:
    from weightclip.engine._engine import PrivacyEngine

FORMAT = 2
_LEDGER = "ledger.json"
_UNCOUNTED = (
    "resumed without a ledger: releases made after this checkpoint was saved, or by other resumes from it, are not "
    "counted; use PrivacyEngine(ledger=path)."
)


def save(engine: PrivacyEngine, path: Any) -> None:
    """Write the folder ``path``; what it held before stays whole until the new ledger takes its place.

    Of several processes the first one writes, since all hold the same; of a sharded model each writes its rows.
    """
    if engine.model is None:
        raise ContractError("nothing to save: call make_private first.")
    ranks, shards = engine.ranks, engine.shards
    if shards is None and not ranks.first:
        return
    if shards is not None:
        ranks.agree(lambda: {"engine.save()": b""})
    state = engine.model.state_dict()
    if any(v.is_floating_point() and not bool(torch.isfinite(v).all()) for v in state.values()):
        raise ContractError("weights are not finite: not saved; the last good checkpoint is untouched.")
    tensors = {f"model.{k}": _stored(v) for k, v in state.items()}
    ledger = {
        "steps": engine.steps, "draws": engine.loader.state_dict()["draws"], "settings": _settings(engine),
        "budget": engine.budget, "resumed": engine.resumed, "gains": engine.training.sensitivity.gains.state(tensors),
        "quantiles": None if engine.training.quantiles is None else engine.training.quantiles.state(),
        "optimizer": _flatten(engine.optimizer.state_dict(), tensors), "streams": None, "data": None,
        "file": None if engine.ledger is None else engine.ledger.state(), "runs": _counts(engine),
    }  # fmt: skip
    if not engine.streams.is_secure:
        ledger["streams"], ledger["data"] = engine.streams.state(), fingerprint(engine, engine.streams)
        tensors |= {f"random.{kind}": value for kind, value in _random_states(engine.device).items()}
    target = Path(path)

    def made() -> str:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WeightclipError(f"cannot write the checkpoint '{target}': {error}") from error
        return f"weights-{secrets.token_hex(8)}"

    name = made() if shards is None else ranks.tell(made)
    with alone(target) if ranks.first else contextlib.nullcontext():
        if shards is None:
            _replace(target, f"{name}.safetensors", tensors, ledger)
            return
        written = write_shards(engine, target / name, tensors)
        ranks.tell(lambda: _commit(target, name, {"shards": written}, ledger))


def _replace(target: Path, name: str, tensors: dict[str, Tensor], ledger: dict[str, Any]) -> None:
    weights = target / name
    try:
        save_file(tensors, str(weights))
        sync_file(weights)
        _commit(target, name, {}, ledger)
    except BaseException:
        if not _is_named(target, name):  # an interruption behind that moment is too late
            weights.unlink(missing_ok=True)
        raise


def _is_named(target: Path, name: str) -> bool:
    """Whether these weights are the checkpoint."""
    try:
        return json.loads((target / _LEDGER).read_text())["weights"] == name
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _commit(target: Path, name: str, more: dict[str, Any], ledger: dict[str, Any]) -> None:
    """What ``name`` holds is complete: it becomes the checkpoint, and what was there before is removed."""
    new = target / f".{name}.json"
    try:
        book = {"format": FORMAT, "weights": name, **more, "checksum": _checksum(ledger, target / name, more)}
        new.write_text(json.dumps({**book, "ledger": ledger}, indent=1))
        sync_file(new)
        os.replace(new, target / _LEDGER)  # the one moment in which the checkpoint changes
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    for old in [*target.glob("weights-*.safetensors"), *target.glob(".weights-*.json")]:
        if old != target / name:
            old.unlink(missing_ok=True)
    remove_others(target, name)


def load(engine: PrivacyEngine, path: Any, *, exact: bool) -> None:
    """Resume a run; see :meth:`weightclip.PrivacyEngine.load`.

    Formal guarantees:
        With a ledger, what is counted is what the ledger holds, and a ledger that holds less than the checkpoint knows
        of is refused. Without one, steps counted are never fewer than those this engine or the checkpoint has charged;
        releases between the save and the end of that run are not known. Unless ``exact``, noise and
        draws come from streams no earlier step has used, so no two sums ever share noise. With ``exact`` they are those
        the run would have used without the interruption, and data, settings and random states are checked or restored
        to be the same: steps that are run again are the same steps. A loop that draws other random numbers than
        torch's own must not be resumed exactly.
    """
    if engine.model is None:
        raise ContractError("call make_private with the run's settings first, then load.")
    engine.ranks.agree(lambda: {"engine.load()": str(exact).encode()})
    # of several processes the first one reads, and all go on with what it found; rows of a sharded model each reads
    book, tensors, data, nonce = engine.ranks.tell(lambda: _found(engine, Path(path), exact))
    ledger = book["ledger"]
    if engine.shards is not None:
        tensors = read_shards(engine, Path(path) / book["weights"], book)
    mine = _settings(engine)
    # one count of steps stands for one mechanism; a ledger holds each run's own
    public = () if engine.ledger else ("noise_multiplier", "sample_rate", "expected_batch_size", "mechanism")
    for name in mine if exact else public:
        if ledger["settings"][name] != mine[name]:
            raise ContractError(
                f"the checkpoint was made with {name} = {ledger['settings'][name]}, this engine has {mine[name]}."
            )
    if exact:
        streams, resumed = _same_streams(engine, ledger, data), ledger["resumed"]
    else:
        streams, resumed = engine.streams.advance(nonce), ledger["resumed"] + 1
    runs = _together(_counts(engine), ledger.get("runs") or {"": ledger["steps"]})
    if exact and engine.ledger is None and sum(runs.values()) > max(engine.steps, ledger["steps"]):
        raise ContractError("this engine has made steps of another run: resume exactly with a new one.")
    weights = {k[len("model.") :]: v for k, v in tensors.items() if k.startswith("model.")}
    here = engine.model.state_dict()
    if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in here.items()}:
        raise ContractError("the checkpoint holds another model: its parameters have other names or shapes.")
    try:
        engine.optimizer.load_state_dict(_unflatten(ledger["optimizer"], tensors))
    except ValueError as error:
        raise ContractError(f"the checkpoint holds another optimizer: {error}") from error
    engine.model.load_state_dict(weights)
    if engine.ledger is None:
        # releases made beyond the checkpoint stay charged, and so do those of other runs
        engine.runs = runs
        engine.steps = sum(runs.values())
        engine.uncounted = True
    if exact:  # nothing was released after these draws, or the same will be
        engine.loader.rewind(ledger["draws"])
    else:
        engine.loader.load_state_dict({"draws": ledger["draws"]})
    engine.streams, engine.loader.streams, engine.resumed = streams, streams, resumed
    engine.training.drop()
    engine.training.info = None
    engine.training.sensitivity.gains.reset()
    if engine.training.quantiles is not None:
        engine.training.quantiles.load_state(ledger["quantiles"] or {})
    if exact:
        engine.training.sensitivity.gains.restore(ledger["gains"], tensors)
        _restore_random_states({k[len("random.") :]: v for k, v in tensors.items() if k.startswith("random.")})
    if engine.uncounted:  # last, so that a warning taken for an error leaves nothing half loaded
        warnings.warn(_UNCOUNTED, UncountedReleases, stacklevel=3)


def _counts(engine: PrivacyEngine) -> dict[str, int]:
    """Releases without a ledger, by the names of the runs that made them; this run's is among them."""
    own = engine.steps - sum(engine.runs.values()) + engine.runs.get(engine.run, 0)
    return {**engine.runs, engine.run: own}


def _together(mine: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    """Releases of all runs: what two counts say of one run is the same releases, as far as both go."""
    return {name: max(mine.get(name, 0), theirs.get(name, 0)) for name in [*mine, *theirs]}


def _found(
    engine: PrivacyEngine, folder: Path, exact: bool
) -> tuple[dict[str, Any], dict[str, Tensor], str | None, int]:
    """A checkpoint of this engine's releases, the data's fingerprint where it matters, and a nonce.

    No other resume shares the nonce: replayed steps never meet noise that was used before.
    """
    book, tensors = _read(folder, engine.shards is not None)
    ledger = book["ledger"]
    _check_file(engine, ledger)
    saved = ledger["streams"] if exact and not engine.streams.is_secure else None
    data = None if saved is None else fingerprint(engine, Streams.from_state(saved))
    return book, tensors, data, int.from_bytes(os.urandom(7), "little")


def _read(folder: Path, sharded: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Ledger and tensors of a checkpoint, if both are whole, belong together and are what they should be.

    ``sharded``: the tensors are read by all ranks, later.
    """
    for _ in range(5):  # another process may save between our reading of the ledger and of the weights it names
        book, text = None, ""
        try:
            text = (folder / _LEDGER).read_text(encoding="utf-8")
            book = json.loads(text)
            if book["format"] != FORMAT:
                raise ValueError(f"format {str(book['format'])[:20]}, this version reads {FORMAT}")
            weights, more = folder / Path(book["weights"]).name, {k: book[k] for k in ("shards",) if k in book}
            if _checksum(book["ledger"], weights, more) != book["checksum"]:
                raise ValueError("its files were changed or do not belong together")
            if sharded:
                if not more:
                    raise ValueError("it is of a model that was whole: load it before fully_shard")
                return book, {}
            tensors = read_whole(weights, book) if more else load_file(str(weights))
            check_ledger(book["ledger"], tensors)
            return book, tensors
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            if isinstance(error, FileNotFoundError) and book is not None and _changed(folder / _LEDGER, text):
                continue
            raise WeightclipError(f"cannot read the checkpoint '{folder}': {error}") from error
    raise WeightclipError(f"cannot read the checkpoint '{folder}': another process keeps replacing it.")


def _changed(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") != text
    except (OSError, ValueError):
        return False


def _check_file(engine: PrivacyEngine, ledger: dict[str, Any]) -> None:
    """A checkpoint goes with the ledger that counted its releases, which must still hold them."""
    known, mine = ledger.get("file"), engine.ledger
    if mine is None:
        if known is not None:
            raise ContractError("the checkpoint's releases are in a ledger: pass it as PrivacyEngine(ledger=path).")
    elif known is None or known["id"] != mine.state()["id"]:
        raise ContractError(f"the checkpoint's releases are not in the ledger {mine.path}: use the ledger of its run.")
    elif known["charges"] > mine.charges or not mine.knows(known["head"]):
        raise ContractError(
            f"ledger {mine.path} counts {mine.charges} releases and lacks some of the checkpoint's {known['charges']}: "
            "restore the file."
        )


def _settings(engine: PrivacyEngine) -> dict[str, Any]:
    """What must be the same for the same noise to meet the same sums."""
    release = engine.training.release
    texts = {"bounds": engine.bounds, "loss": engine.criterion.loss, "allocation": release.allocation,
             "mechanism": release.knorm}  # fmt: skip
    return {
        "noise_multiplier": engine.noise_multiplier, "sample_rate": engine.loader.sample_rate,
        "expected_batch_size": engine.expected_batch_size, "max_physical_batch_size": engine.loader.piece_size,
        "augmentation_multiplicity": engine.views, "release_grid": release.grid,
        **{name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in texts.items()},
    }  # fmt: skip


def _same_streams(engine: PrivacyEngine, ledger: dict[str, Any], data: str | None) -> Streams:
    """The saved run's streams, if this engine may continue them."""
    if engine.streams.is_secure or ledger["streams"] is None:
        raise ContractError("exact resume needs generator= in both runs; secure noise is never written.")
    if ledger["streams"]["seed"] != engine.streams.state()["seed"]:
        raise ContractError("exact resume needs the same generator seed as the saved run.")
    if engine.steps > ledger["steps"]:
        how = "load it without exact=True" if engine.ledger else "resume exactly with a fresh engine"
        raise ContractError(f"this engine or its ledger is past the checkpoint: {how}.")
    if data != ledger["data"]:
        raise ContractError("the data set differs from the saved run's: the same noise must not meet other data.")
    return Streams.from_state(ledger["streams"])


def fingerprint(engine: PrivacyEngine, streams: Streams) -> str:
    """A keyed hash of the whole data set. Its key is the run's seed: a seeded checkpoint is as secret as the seed."""
    digest = hashlib.blake2b(key=streams.key("fingerprint"), digest_size=32)
    dataset = engine.loader.dataset
    tensors = getattr(dataset, "tensors", None)
    for value in tensors if tensors is not None else (dataset[i] for i in range(len(dataset))):  # type: ignore[arg-type]
        feed(digest, value)
    return digest.hexdigest()


def feed(digest: Any, value: Any) -> None:
    """Add a record, or any nested value, to a digest."""
    if isinstance(value, Tensor):
        feed(digest, value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (tuple, list)):
        digest.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            feed(digest, item)
    elif isinstance(value, dict):
        for key in value:
            digest.update(str(key).encode())
            feed(digest, value[key])
    else:
        digest.update(pickle.dumps(value, protocol=5))


def _checksum(ledger: dict[str, Any], weights: Path, more: dict[str, Any] | None = None) -> str:
    digest = hashlib.blake2b(json.dumps(ledger, sort_keys=True).encode(), digest_size=32)
    if more:  # digests of the shards are part of it
        digest.update(json.dumps([weights.name, more], sort_keys=True).encode())
        return digest.hexdigest()
    with weights.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _stored(value: Tensor) -> Tensor:
    if hasattr(value, "device_mesh"):  # rows of this rank, written before anything changes them
        return value.detach()
    return value.detach().cpu().contiguous().clone()


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """torch's own generators, which dropout reads."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _flatten(value: Any, tensors: dict[str, Tensor], prefix: str = "optimizer") -> Any:
    """Nested state with its tensors moved to ``tensors`` and named in their place."""
    if isinstance(value, Tensor):
        tensors[prefix] = _stored(value)
        return {"__tensor__": prefix}
    if isinstance(value, dict):
        return {"__dict__": [[k, _flatten(v, tensors, f"{prefix}.{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"__list__": [_flatten(v, tensors, f"{prefix}.{i}") for i, v in enumerate(value)],
                "tuple": isinstance(value, tuple)}  # fmt: skip
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise WeightclipError(f"optimiser state '{prefix}' of type {type(value).__name__} cannot be saved.")


def _unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__dict__" in value:
        return {k: _unflatten(v, tensors) for k, v in value["__dict__"]}
    items = [_unflatten(v, tensors) for v in value["__list__"]]
    return tuple(items) if value["tuple"] else items
