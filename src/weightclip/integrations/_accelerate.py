"""Hugging Face Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader

from weightclip.distributed import find_ranks
from weightclip.errors import ContractError
from weightclip.integrations._privacy import Batches, Privacy, refuse_uncounted


def prepare(
    accelerator: Accelerator, privacy: Privacy, *, epochs: float, module: nn.Module, optimizer: Any,
    data_loader: DataLoader, criterion: Any,
) -> tuple[nn.Module, Any, Batches, nn.Module]:  # fmt: skip
    """In place of ``accelerator.prepare(model, optimizer, loader)``: the same, private, and the loss comes back too.

    The loop stays as it is: ``accelerator.backward(loss(model(x), y))``, and ``with accelerator.accumulate(model)``
    where gradients are accumulated. The loader's batch size times ``gradient_accumulation_steps`` is then the expected
    size of a draw, which comes in a public number of pieces of at most the loader's batch size.

    Returns:
        (model, optimizer, loader, criterion); the engine is ``loader.engine``.

    Formal guarantees:
        Those of :class:`weightclip.PrivacyEngine`. Several processes each hold the plain model, which is not wrapped:
        the engine adds their sums up before the noise. Plugins that shard or wrap it and gradient scalers are refused.
    """
    processes, kind = accelerator.num_processes, accelerator.distributed_type.value
    if processes != find_ranks().count or kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ContractError(
            f"Accelerate runs {processes} processes ({kind}), which would average raw gradients or shard the model: "
            "launch one process, or several by torchrun without plugins."
        )
    if accelerator.scaler is not None:
        raise ContractError("mixed_precision='fp16' scales gradients by the data: use 'bf16' or 'no'.")
    steps, size, records = accelerator.gradient_accumulation_steps, data_loader.batch_size or 1, data_loader.dataset
    # moved, and cast: before the test of the model that is trained; not wrapped to average raw gradients
    module = accelerator.prepare_model(module, evaluation_mode=kind != "NO")
    engine = privacy.accumulating(size, steps, len(records)).engage(  # type: ignore[arg-type]
        epochs=epochs, divides=True, module=module, optimizer=optimizer, data_loader=data_loader, criterion=criterion,
    )  # fmt: skip
    accelerator.gradient_accumulation_steps = engine.loader.pieces
    own: set[Path] = set()  # states that this run saved: their releases are counted
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: own.add(Path(folder).resolve()))
    accelerator.register_load_state_pre_hook(
        lambda models, folder: None if Path(folder).resolve() in own else refuse_uncounted(engine)
    )
    loader = Batches(engine, lambda batch: send_to_device(batch, accelerator.device))
    return module, accelerator.prepare_optimizer(optimizer), loader, engine.criterion
