"""Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer  # pyright: ignore[reportMissingImports]
from lightning.pytorch.strategies import DDPStrategy  # pyright: ignore[reportMissingImports]
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from weightclip.engine import PrivacyEngine
from weightclip.errors import ContractError, WeightclipError
from weightclip.integrations._privacy import Batches, Privacy, refuse_uncounted


class PlainDDP(DDPStrategy):
    """Lightning's "ddp" without the wrapper: every process holds the plain module, and its engine adds the sums up.

    Formal guarantees:
        Nothing here averages or exchanges gradients; those of the class :class:`weightclip.PrivacyEngine` hold.
    """

    def configure_ddp(self) -> None:
        """The module stays as it is: a wrapper would average raw gradients before the noise."""


class PrivacyCallback(Callback):
    """Epsilon so far in the progress bar, and pieces of a draw accumulated into one step; refuses what is not private.

    Attributes:
        engine: The engine of the run.
    """

    def __init__(self, engine: PrivacyEngine, delta: float) -> None:
        self.engine, self.delta = engine, delta

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One optimiser step takes all pieces of a draw."""
        pieces = self.engine.loader.pieces
        if trainer.world_size != self.engine.ranks.count or (
            trainer.world_size > 1 and not isinstance(trainer.strategy, PlainDDP)
        ):
            raise ContractError(
                f"Lightning runs {trainer.world_size} processes, which average raw gradients: use devices=1, or "
                "torchrun, init_process_group before make_private_module, and Trainer(strategy=PlainDDP())."
            )
        if trainer.gradient_clip_val:
            raise ContractError(
                "gradient_clip_val clips sums over records: use Privacy(bounds=Bounds(max_grad_norm=C))."
            )
        if trainer.accumulate_grad_batches not in (1, pieces):
            raise ContractError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} would add up draws: leave it out, and set "
                "the loader's batch_size and Privacy(max_physical_batch_size=...)."
            )
        trainer.accumulate_grad_batches = pieces

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """``ckpt_path`` of a fit: weights that were released before, by a run whose count is elsewhere."""
        if trainer.state.fn == "fit":
            refuse_uncounted(self.engine)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Epsilon so far: every ``log_every_n_steps`` releases, and at the end of a pass."""
        every = max(1, getattr(trainer, "log_every_n_steps", 50))
        if self.engine.steps and (self.engine.steps % every == 0 or trainer.is_last_batch):
            pl_module.log("epsilon", self.engine.get_epsilon(self.delta), prog_bar=True, batch_size=1)


def make_private_module(
    module: LightningModule, data_loader: DataLoader, privacy: Privacy, *, epochs: float, network: str = "",
    criterion: str = "loss",
) -> tuple[LightningModule, Batches, PrivacyCallback]:  # fmt: skip
    """What ``trainer.fit`` needs to train a LightningModule privately: (module, loader, callback).

    Its ``training_step`` stays as it is, if it calls its network once a batch and takes ``self.loss(...)`` (or the
    attribute named ``criterion``) of the output. Training losses are NaN for it unless ``show_losses``; what else it
    logs of training batches is *not* private.

    Args:
        module: Optimised automatically, by one optimiser.
        data_loader: Of the records; its batch size is the expected size of a draw.
        privacy: The budget, and how records are limited.
        epochs: As ``max_epochs`` of the trainer.
        network: Attribute that holds the network which ``training_step`` calls; "" if it calls ``self(x)``.
        criterion: Attribute that holds the loss, a module or function.

    Formal guarantees:
        Those of :class:`weightclip.PrivacyEngine`, for the weights and everything computed from them.
    """
    if not module.automatic_optimization:
        raise ContractError("manual optimisation is a loop of your own: make_private of a PrivacyEngine needs no help.")
    found: Any = module.configure_optimizers()
    optimizer = _only_optimizer(found)
    part: Any = module.get_submodule(network)
    loss = getattr(module, criterion, None)
    if loss is None:
        raise WeightclipError(
            f"the module has no attribute '{criterion}': name the one that holds the loss, criterion=."
        )
    module._modules.pop(criterion, None)  # the loss is no part of what is trained
    engine = privacy.engage(
        epochs=epochs, divides=True, module=part, optimizer=optimizer, data_loader=data_loader, criterion=loss
    )
    object.__setattr__(module, criterion, engine.criterion)
    object.__setattr__(module, "configure_optimizers", lambda: found)  # the very objects that are hooked
    return module, Batches(engine), PrivacyCallback(engine, privacy.delta)


def _only_optimizer(found: Any) -> Optimizer:
    """The one optimiser in what ``configure_optimizers`` returned."""
    first = found["optimizer"] if isinstance(found, dict) else found
    while isinstance(first, (list, tuple)) and first:
        several = [o for o in first if isinstance(o, Optimizer)]
        if len(several) > 1:
            raise ContractError("several optimisers would release one batch several times: use one.")
        first = first[0]["optimizer"] if isinstance(first[0], dict) else first[0]
    if not isinstance(first, Optimizer):
        raise WeightclipError(
            "configure_optimizers must return an optimiser (with schedulers, as Lightning takes them)."
        )
    return first
