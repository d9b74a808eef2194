"""Save and resume: weights, optimiser and ledger in one folder (safetensors + JSON), written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weightclip._streams import Streams
from weightclip.errors import ContractError, WeightclipError

if TYPE_CHECKING:
    from weightclip.engine import PrivacyEngine

FORMAT = 1


def save(engine: PrivacyEngine, path: Any) -> None:
    """Write the folder ``path``; an existing one is replaced only when the new one is complete."""
    if engine.model is None:
        raise ContractError("nothing to save: call make_private first.")
    state = {k: v for k, v in engine.model.state_dict().items()}
    if any(v.is_floating_point() and not bool(torch.isfinite(v).all()) for v in state.values()):
        raise ContractError("weights are not finite: not saved; the last good checkpoint is untouched.")
    tensors = {f"model.{k}": v.detach().cpu().contiguous().clone() for k, v in state.items()}
    optimiser = _flatten(engine.optimizer.state_dict(), tensors)
    ledger = {
        "format": FORMAT, "steps": engine.steps, "draws": engine.loader.state_dict()["draws"],
        "noise_multiplier": engine.noise_multiplier, "sample_rate": engine.loader.sample_rate,
        "expected_batch_size": engine.expected_batch_size, "budget": engine.budget, "accountant": engine.accountant,
        "resumed": engine._resumed, "optimizer": optimiser,
        "streams": None if engine.streams.is_secure else engine.streams.state(),
        "data": None if engine.streams.is_secure else fingerprint(engine),
    }  # fmt: skip
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        save_file(tensors, str(scratch / "weights.safetensors"))
        (scratch / "ledger.json").write_text(json.dumps(ledger, indent=1))
        if target.exists():
            old = target.with_name(f".{target.name}-old-{os.getpid()}")
            os.replace(target, old)
            os.replace(scratch, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def load(engine: PrivacyEngine, path: Any, *, exact: bool) -> None:
    """Resume a run; see :meth:`weightclip.PrivacyEngine.load`.

    Formal guarantees:
        Steps counted are never fewer than those this engine or the checkpoint has charged. Unless ``exact``, noise and
        draws come from streams no earlier step has used, so no two sums ever share noise. With ``exact`` they are those
        the run would have used without the interruption, and the data set is checked to be the same.
    """
    if engine.model is None:
        raise ContractError("call make_private with the run's settings first, then load.")
    folder = Path(path)
    try:
        ledger = json.loads((folder / "ledger.json").read_text())
        tensors = load_file(str(folder / "weights.safetensors"))
    except (OSError, ValueError) as error:
        raise WeightclipError(f"cannot read the checkpoint '{folder}': {error}") from error
    for name, mine in (("noise_multiplier", engine.noise_multiplier), ("sample_rate", engine.loader.sample_rate),
                       ("expected_batch_size", engine.expected_batch_size)):  # fmt: skip
        if ledger[name] != mine:
            raise ContractError(f"the checkpoint was made with {name} = {ledger[name]}, this engine has {mine}.")
    if exact:
        if engine.streams.is_secure or ledger["streams"] is None:
            raise ContractError("exact resume needs generator= in both runs; secure noise is never written.")
        if ledger["streams"]["seed"] != engine.streams.state()["seed"]:
            raise ContractError("exact resume needs the same generator seed as the saved run.")
        if engine.steps > ledger["steps"]:
            raise ContractError("this engine is past the checkpoint: resume exactly with a fresh engine.")
        streams = Streams.from_state(ledger["streams"])
        if fingerprint(engine, streams) != ledger["data"]:
            raise ContractError("the data set differs from the saved run's: the same noise must not meet other data.")
        resumed = ledger["resumed"]
    else:
        # a nonce no other resume shares: replayed steps never meet noise that was used before
        nonce = int.from_bytes(os.urandom(7), "little")
        streams, resumed = engine.streams.advance(nonce), ledger["resumed"] + 1
    engine.model.load_state_dict({k[len("model.") :]: v for k, v in tensors.items() if k.startswith("model.")})
    engine.optimizer.load_state_dict(_unflatten(ledger["optimizer"], tensors))
    replayed = max(0, engine.steps - ledger["steps"])  # releases this engine made beyond the checkpoint stay charged
    engine.steps = ledger["steps"] + replayed
    engine.loader.load_state_dict({"draws": ledger["draws"]})
    engine.streams, engine.loader.streams, engine._resumed = streams, streams, resumed
    engine._drop_sum()
    engine._info = None
    engine._gains.reset()


def fingerprint(engine: PrivacyEngine, streams: Streams | None = None) -> str:
    """A keyed hash of the whole data set (the key is the run's seed, so the checkpoint alone says nothing of it)."""
    digest = hashlib.blake2b(key=(streams or engine.streams).key("fingerprint"), digest_size=32)
    dataset = engine.loader.dataset
    tensors = getattr(dataset, "tensors", None)
    if tensors is not None:
        for tensor in tensors:
            _feed(digest, tensor)
    else:
        for i in range(len(dataset)):  # type: ignore[arg-type]
            _feed(digest, dataset[i])
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else
                      repr(value.item()).encode())  # fmt: skip
    elif isinstance(value, (tuple, list)):
        for item in value:
            _feed(digest, item)
    elif isinstance(value, dict):
        for key in value:
            digest.update(str(key).encode())
            _feed(digest, value[key])
    else:
        digest.update(repr(value).encode())


def _flatten(value: Any, tensors: dict[str, Tensor], prefix: str = "optimizer") -> Any:
    """Nested state with its tensors moved to ``tensors`` and named in their place."""
    if isinstance(value, Tensor):
        tensors[prefix] = value.detach().cpu().contiguous().clone()
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
