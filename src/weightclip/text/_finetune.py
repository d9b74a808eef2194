"""From texts to a private classifier whose encoder is trained too, by low-rank updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from weightclip import losses
from weightclip.engine import PrivacyEngine
from weightclip.errors import ContractError, NotFinite, WeightclipError
from weightclip.nn import ParameterAverage
from weightclip.tabular import (
    UNKNOWN,
    Budget,
    FitPlan,
    Fitted,
    Model,
    Settings,
    Table,
    Trained,
    fit_public,
    privacy_report,
    root_generator,
    settings_json,
)
from weightclip.text._encoder import TextEncoder
from weightclip.text._file import WHOLE, feature_columns
from weightclip.text._lora import Classifier, Lora, Update, head_weights, words_and_ends

_FRACTION, _EPOCHS, _RATE = 1 / 15, 12, 5e-3  # of the text study (docs/text.md), whose data are not the user's
_PIECE = 256  # texts of a physical batch on a CPU
_BYTES = 250_000  # of a GPU's memory for each token of one: twice what MiniLM takes
_ENGINE = "text/engine"


@dataclass(frozen=True, eq=False)
class Tuned:
    """A fine-tuned classifier of texts."""

    model: Model  #: its last part, on the numbers that the tuned encoder gives
    update: Update  #: what was added to the encoder
    report: dict[str, Any]  #: the privacy report
    epsilon: float  #: ε as the engine that trained it counts it


def fit_lora(
    rows: np.ndarray, codes: np.ndarray, classes: tuple[Any, ...], target: str, text: str, encoder: TextEncoder,
    lora: Lora, plan: FitPlan,
) -> Tuned:  # fmt: skip
    """Train low-rank updates of an encoder and a head with :class:`weightclip.PrivacyEngine`.

    Args:
        rows: The private texts, as `TextEncoder.padded` makes them.  # texts x tokens
        codes: Place of each text's label in `classes`; anything else contributes nothing.
        classes: Public list of classes.
        target: Name of the target, for people.
        text: Name of the column of texts.
        encoder: The public pretrained encoder.
        lora: What is trained of it.
        plan: Budget, randomness and what the user chose, decided beforehand.

    Formal guarantees:
        Model, update and report are (report epsilon, delta)-DP under adding or removing one text, given n, the classes,
        the plan and the encoder: T Poisson-sampled Gaussian mechanisms of the engine, each of which releases the sum of
        the records' gradients, capped jointly over the head and all updates. Averages of released weights are free.
    """
    if plan.ledger is not None or plan.checkpoint is not None:
        raise WeightclipError("fine-tuning keeps no ledger and cannot be resumed: leave --ledger and --resume out.")
    if plan.spent or plan.past or plan.weights is not None:
        raise WeightclipError("fine-tuning counts no earlier releases and takes no weights of records: leave them out.")
    n = plan.records or len(rows)
    settings = Settings(
        hidden=(), batch=max(1, round(_FRACTION * n)), epochs=plan.chosen.get("epochs", _EPOCHS), lr=_RATE,
        final_lr=0.1, averaging=0.95, bias_scale=1.0, temperature=1.0, joint_cap=1.0,
    )  # fmt: skip
    outputs = len(classes) if len(classes) > 2 else 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = words_and_ends(rows).to(device)
    if outputs == 1:  # a label beyond [0, 1] contributes nothing
        y = torch.from_numpy(np.asarray(codes, dtype=np.float32)).to(device)
    else:
        y = torch.from_numpy(np.where((codes >= 0) & (codes < outputs), codes, UNKNOWN).astype(np.int64)).to(device)
    network = Classifier(encoder, lora, outputs, plan.streams).to(device).eval()  # without dropout
    run, average, spent = _train(network, x, y, settings, plan, n)
    with average.apply():
        update, head = network.update(), head_weights(network.head)
    columns = feature_columns(text, encoder.width, WHOLE)
    scale = fit_public(Table(columns, np.zeros((0, len(columns)))), 1).encoder
    said = f"updates of rank {lora.rank} beside {len(update.layers)} layers of the encoder were trained with the head"
    public = {**settings_json(settings), "rank": lora.rank, "tokens": lora.tokens, "places": list(lora.places)}
    read = Fitted(scale, statements=(f"texts are read as tokens of a public vocabulary: free; {said}",))
    report = privacy_report(read, run, plan, n, {"classes": len(classes), "settings": public})
    if not spent <= report["epsilon"] * (1 + 1e-9):
        raise ContractError(f"the engine has spent epsilon {spent:g}, the report says {report['epsilon']:g}.")
    model = Model(scale, (head,), "classification", classes, target=target)
    return Tuned(model, update, report, spent)


def _train(
    network: Classifier, x: Tensor, y: Tensor, settings: Settings, plan: FitPlan, n: int
) -> tuple[Trained, ParameterAverage, float]:
    """Train in place: what was released, the average of the released weights, and ε as the engine counts it."""
    q, steps, batch = settings.sample_rate(n), settings.steps(n), min(settings.batch, n)
    divisor = settings.divisor(n, plan.records is not None)
    sigma = Budget(plan.epsilon, plan.delta, plan.accountant).sigma(q, steps)
    loss = losses.BCEWithLogits() if y.is_floating_point() else losses.CrossEntropy()
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=settings.lr, fused=True)
    engine = PrivacyEngine(plan.accountant)
    with torch.enable_grad():
        engine.make_private(
            module=network, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
            criterion=loss, noise_multiplier=sigma, bounds=settings.bounds(), sample_rate=q,
            expected_batch_size=divisor, max_physical_batch_size=_piece(batch, x),
            generator=root_generator(plan.streams, _ENGINE),
        )  # fmt: skip
        try:
            average = ParameterAverage(network.trained, settings.averaging)
            _loop(engine, average, settings, steps, plan.progress, x.device.type)
            layers = [{k: row[k] for k in ("name", "parameters", "sensitivity", "noise")}
                      for row in engine.report()["layers"]]  # fmt: skip
            spent = engine.get_epsilon(plan.delta)
        finally:
            engine.detach()
    return Trained(settings, (), sigma, q, steps, divisor, tuple(layers)), average, spent


def _loop(
    engine: PrivacyEngine, average: ParameterAverage, settings: Settings, steps: int,
    progress: Callable[[int, int], None] | None, device: str,
) -> None:  # fmt: skip
    """Steps until as many were released as planned; in half precision on a GPU."""
    step, (group,), done = engine.fused_step(), engine.optimizer.param_groups, 0
    try:
        while done < steps:
            for x, y in engine.loader:
                group["lr"] = settings.lr * (1 - (1 - settings.final_lr) * done / steps)
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    step(x, y)
                if engine.steps == done:  # a part of a draw
                    continue
                done = engine.steps
                average.update()
                if progress is not None:
                    progress(done, steps)
                if done >= steps:
                    break
    except ContractError as error:
        if all(bool(torch.isfinite(p).all()) for p in group["params"]):
            raise
        raise NotFinite("training left the finite numbers: take fewer --epochs, or leave --finetune out.") from error


def _piece(batch: int, x: Tensor) -> int | None:
    """Texts of a physical batch, by public numbers; None where a whole draw is small enough."""
    most = _PIECE
    if x.device.type == "cuda":
        most = max(64, torch.cuda.get_device_properties(x.device).total_memory // (_BYTES * x.shape[2]))
    return most if 2 * batch > most else None
