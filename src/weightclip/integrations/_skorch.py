"""skorch: scikit-learn's conventions around a torch module."""

from __future__ import annotations

from typing import Any

from skorch.callbacks import LoadInitState  # pyright: ignore[reportMissingImports]
from skorch.helper import predefined_split  # pyright: ignore[reportMissingImports]
from torch import nn

from weightclip.engine import PrivacyEngine
from weightclip.errors import ContractError
from weightclip.integrations._privacy import UNCOUNTED, Privacy


class PrivateNet:
    """Put it before skorch's class: ``class Net(PrivateNet, NeuralNetClassifier)``, and give ``privacy=Privacy(...)``.

    Every ``fit`` is a run of its own with the whole budget for ``max_epochs``; epsilons of several fits on the same
    records add up. The history shows epsilon for each epoch. The engine is ``net.engine_``.

    Formal guarantees:
        Those of :class:`weightclip.PrivacyEngine`, for weights and for the history (losses are withheld unless
        ``show_losses``, batch sizes are the public one). A split of the records for validation is refused (any but
        ``predefined_split``): its scores would not be private.
    """

    engine_: PrivacyEngine | None = None

    def __init__(self, *args: Any, privacy: Privacy, **named: Any) -> None:
        super().__init__(*args, **named)
        self.privacy = privacy

    def initialize(self) -> Any:
        """A new module, and a new run."""
        self.engine_ = None
        return super().initialize()  # type: ignore[misc]

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        """skorch's iterator; for training, draws of the engine."""
        iterator = super().get_iterator(dataset, training)  # type: ignore[misc]
        if not training:
            return iterator
        net: Any = self
        if self.engine_ is None:
            self._refuse(net)
            self.engine_ = self.privacy.engage(
                epochs=net.max_epochs, module=net.module_, optimizer=net.optimizer_, data_loader=iterator,
                criterion=net.criterion_,
            )  # fmt: skip
        elif getattr(dataset, "X", dataset) is not getattr(
            self.engine_.loader.dataset, "X", self.engine_.loader.dataset
        ):
            raise ContractError("partial_fit got other records than the run began with: call fit, with its own budget.")
        return self.engine_.loader

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, training: bool = False, **named: Any) -> Any:
        """The private criterion while training, skorch's own otherwise."""
        if training and self.engine_ is not None:
            return self.engine_.criterion(y_pred, y_true)
        return super().get_loss(y_pred, y_true, *args, training=training, **named)  # type: ignore[misc]

    def run_single_epoch(self, iterator: Any, training: bool, prefix: str, step_fn: Any, **fit_params: Any) -> None:
        """skorch's, but that the size of a training batch is the public one."""
        if not training or self.engine_ is None:
            return super().run_single_epoch(iterator, training, prefix, step_fn, **fit_params)  # type: ignore[misc]
        net: Any = self
        count = 0
        for batch in iterator:
            net.notify("on_batch_begin", batch=batch, training=True)
            step = step_fn(batch, **fit_params)
            net.history.record_batch(prefix + "_loss", step["loss"].item())
            net.history.record_batch(prefix + "_batch_size", self.engine_.expected_batch_size)
            net.notify("on_batch_end", batch=batch, training=True, **step)
            count += 1
        net.history.record(prefix + "_batch_count", count)
        return None

    def on_epoch_end(self, net: Any, *args: Any, **named: Any) -> None:
        """Epsilon so far."""
        super().on_epoch_end(net, *args, **named)  # type: ignore[misc]
        if self.engine_ is not None:
            net.history.record("epsilon", round(self.engine_.get_epsilon(self.privacy.delta), 4))

    @staticmethod
    def _refuse(net: Any) -> None:
        split = net.train_split
        if split is not None and getattr(split, "func", None) is not predefined_split(None).func:
            raise ContractError(
                "train_split keeps private records for validation, and their scores would not be private: pass "
                "train_split=None, or predefined_split(a public data set)."
            )
        if net.privacy.ledger is None and any(isinstance(part, LoadInitState) for _, part in net.callbacks_):
            raise ContractError(UNCOUNTED)
        if isinstance(net.criterion_, nn.NLLLoss):
            raise ContractError("skorch takes logarithms before NLLLoss: return logits, criterion=nn.CrossEntropyLoss.")
