"""Steps by other libraries of private training for torch: Opacus, and fastDP where a clone of it can be imported."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from weightclip.errors import WeightclipError

Made = tuple[Any, Any, Any]  # model, optimiser, loss


def _opacus(kind: str, model: nn.Module, optimizer: Any, loss: Any, loader: DataLoader) -> Made:
    """As Opacus makes them."""
    try:
        from opacus import PrivacyEngine as Opacus
    except ImportError as error:
        raise WeightclipError("Opacus is not installed: pip install opacus, or leave its modes out.") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private: Any = Opacus().make_private(
            module=model, optimizer=optimizer, data_loader=loader, criterion=loss, noise_multiplier=1.0,
            max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=kind,
        )  # fmt: skip
    return private[0], private[1], private[2] if kind == "ghost" and len(private) == 4 else loss


def _fastdp(model: nn.Module, optimizer: Any, loss: Any, loader: DataLoader) -> Made:
    """As fastDP makes them: flat clipping by its book-keeping, the cheaper norm chosen for each layer.

    Raises:
        WeightclipError: It is not there, or knows a layer of this model not: it would leave such a layer untrained.
    """
    try:
        from fastDP import PrivacyEngine as FastDP  # type: ignore[import-not-found]
        from fastDP.supported_layers_grad_samplers import (  # type: ignore[import-not-found]
            _supported_layers_norm_sample_AND_clipping as known,
        )
    except ImportError as error:
        raise WeightclipError(
            "fastDP cannot be imported: it is on no package index; clone awslabs/fast-differential-privacy and put the "
            "clone on PYTHONPATH (it needs transformers), or leave its mode out."
        ) from error
    owners = {n: m for n, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}
    strange = [name for name, module in owners.items() if type(module) not in known]
    if strange:
        raise WeightclipError(f"fastDP knows no layer of the type of {strange[0]} ({len(strange)} such layers).")
    batch = loader.batch_size or 1
    with contextlib.redirect_stdout(io.StringIO()):  # it prints how it clips
        FastDP(
            model, batch_size=batch, sample_size=100 * batch, epochs=1, noise_multiplier=1.0, max_grad_norm=1.0,
            clipping_fn="Abadi", clipping_mode="MixOpt", clipping_style="all-layer",
        ).attach(optimizer)  # fmt: skip
    return model, optimizer, loss


OTHERS: dict[str, Callable[[nn.Module, Any, Any, DataLoader], Made]] = {
    "opacus-hooks": partial(_opacus, "hooks"),
    "opacus-ghost": partial(_opacus, "ghost"),
    "fastdp": _fastdp,
}
"""Mode -> (model, optimiser, loss, loader) made private by another library."""


def installed(mode: str) -> bool:
    """Whether the library of a mode can be imported here; the modes of weightclip and plain training need none."""
    return mode not in OTHERS or importlib.util.find_spec("fastDP" if mode == "fastdp" else "opacus") is not None
