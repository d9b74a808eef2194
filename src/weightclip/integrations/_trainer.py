"""Hugging Face Trainer (also of PEFT models)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.models.auto import modeling_auto

from weightclip.engine import PrivacyEngine
from weightclip.errors import ContractError, WeightclipError
from weightclip.integrations._privacy import Privacy
from weightclip.losses import CausalLM

_PRIVATE = ("loss", "grad_norm", "train_loss", "num_input_tokens_seen")  # what the Trainer logs of training records


class _Draws:
    """One item for each draw: the iterator over its pieces. So one step of the Trainer is one release."""

    def __init__(self, loader: DataLoader, size: int) -> None:
        self.plain, self.dataset = loader, loader.dataset
        self._length = max(1, round(1 / min(1.0, size / len(loader.dataset))))  # type: ignore[arg-type]
        self.engine: PrivacyEngine | None = None  # comes when the Trainer has made its optimiser

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Iterator[Any]]:
        engine = self.engine
        assert engine is not None
        pieces = iter(engine.loader)
        for first in pieces:
            yield itertools.chain([first], itertools.islice(pieces, engine.loader.pieces - 1))


class PrivateTrainer(Trainer):
    """The Trainer, private: ``PrivateTrainer(..., privacy=Privacy(epsilon=3, delta=1e-5))``.

    A record is one element of ``train_dataset``. One step of the Trainer is one release over a draw of about
    ``per_device_train_batch_size * gradient_accumulation_steps`` records, computed in pieces of at most
    ``per_device_train_batch_size`` of them. Logs hold epsilon so far and no training losses; evaluation is the
    Trainer's own, so that ``eval_dataset`` must not hold private records. The engine is ``trainer.engine``.

    Args:
        privacy: The budget, and how records are limited.
        criterion: The loss; by default that of the model's kind (classification, regression, causal language model).

    Formal guarantees:
        Those of :class:`weightclip.PrivacyEngine`, for everything the Trainer writes and logs of training (weights,
        optimiser and scheduler states, logs), if ``show_losses`` is off. Not covered: times.
    """

    engine: PrivacyEngine | None = None

    def __init__(self, *args: Any, privacy: Privacy, criterion: Any = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self.args = copy.copy(self.args)
        size, steps = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise ContractError("PrivateTrainer trains on one device: set CUDA_VISIBLE_DEVICES, launch one process.")
        if self.args.fp16:
            raise ContractError("fp16=True scales gradients by the data: use bf16=True.")
        if getattr(self.data_collator, "padding", None) in (True, "longest"):
            raise ContractError(
                f"{type(self.data_collator).__name__} pads to the longest sequence of a batch, which tells its length: "
                "give data_collator with padding='max_length' and a max_length, or tokenise to one length."
            )
        # a step is a draw here; the cap on records takes the place of the clipping of sums
        self.args.gradient_accumulation_steps, self.args.max_grad_norm = 1, 0.0
        self.args.include_num_input_tokens_seen = "no"
        self.privacy, self.criterion, self._size = privacy, criterion or _criterion_of(self.model), size * steps
        self._accumulated = size, steps
        self._draws: _Draws | None = None

    def get_train_dataloader(self) -> Any:
        """One item for each draw."""
        usual: Any = super().get_train_dataloader()
        loader = DataLoader(
            usual.dataset, batch_size=self._size, collate_fn=usual.collate_fn, num_workers=usual.num_workers
        )
        self._draws = _Draws(loader, self._size)
        return self._draws

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Made right after the model and the optimiser were prepared: the moment to make them private."""
        if self._draws is not None and self._draws.engine is None:
            if self.engine is not None:
                raise ContractError("this PrivateTrainer has trained already: make a new one, whose epsilon adds up.")
            (size, steps), data = self._accumulated, self._draws.dataset
            prepared: Any = self.optimizer
            self.engine = self.privacy.accumulating(size, steps, len(data)).engage(  # type: ignore[arg-type]
                epochs=num_training_steps / len(self._draws), module=self.model, data_loader=self._draws.plain,
                optimizer=getattr(prepared, "optimizer", prepared), criterion=self.criterion,
            )  # fmt: skip
            self._draws.engine = self.engine
        return super().create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The next draw; how many labels it has is nobody's business."""
        return [draw for draw in [next(epoch_iterator, None)] if draw is not None], None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """All pieces of a draw: their limited gradients wait in the engine for the optimiser's step."""
        assert self.engine is not None
        model.train()
        total = torch.zeros((), device=self.args.device)
        for piece in inputs:
            batch: Any = self._prepare_inputs(piece)
            labels = batch.pop("labels")
            with self.compute_loss_context_manager():
                loss = self.engine.criterion(model(**batch), labels)
            loss.backward()
            total += loss.detach() if self.privacy.show_losses else 0.0
        return total

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        """Logs without what was computed from training records, and with epsilon so far."""
        hidden = () if self.privacy.show_losses else _PRIVATE
        shown = {name: value for name, value in logs.items() if name not in hidden}
        if self.engine is not None:
            shown["epsilon"] = round(self.engine.get_epsilon(self.privacy.delta), 4)
        super().log(shown, *args, **named)

    def floating_point_ops(self, inputs: Any) -> int:
        """Zero: operations counted over a draw would tell its size."""
        return 0

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        """Train; the result holds no training loss."""
        if resume_from_checkpoint:
            raise ContractError(
                "a checkpoint of the Trainer does not know how often it was released: start anew, or save and load "
                "with trainer.engine (and Privacy(ledger=...), which counts across runs)."
            )
        found = super().train(None, *args, **named)
        if self.privacy.show_losses:
            return found
        metrics = {name: value for name, value in found.metrics.items() if name not in _PRIVATE}
        return found._replace(training_loss=float("nan"), metrics=metrics)


def _criterion_of(model: Any) -> Any:
    """The loss that models of this kind compute themselves, one value for each record."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    name, config = type(plain).__name__, getattr(plain, "config", None)
    if name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return CausalLM()
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        if getattr(config, "problem_type", None) == "multi_label_classification":
            return nn.BCEWithLogitsLoss()
        regression = getattr(config, "problem_type", None) == "regression" or getattr(config, "num_labels", 2) == 1
        return nn.MSELoss() if regression else nn.CrossEntropyLoss()
    raise WeightclipError(f"PrivateTrainer does not know the loss of {name}: pass criterion= (outputs, labels).")
