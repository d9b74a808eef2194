"""A fitted private model of a table: encoder and network, with everything prediction needs and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError
from weightclip.models import MLP
from weightclip.tabular._encoder import Encoder

_ROWS = 1 << 14


@dataclass(frozen=True, eq=False)
class Model:
    """Encoder and dense network.

    Attributes:
        encoder: From raw values to features.
        weights: (weight, bias) of every layer, float32, the temperature folded into the last one.
        task: "classification" or "regression".
        classes: Labels, in the order of the outputs.
        target_range: Interval the target was scaled from; predictions stay inside.
        target: Name of the target column, for people.
    """

    encoder: Encoder
    weights: tuple[tuple[np.ndarray, np.ndarray], ...]
    task: str
    classes: tuple[Any, ...] = ()
    target_range: tuple[float, float] = (0.0, 1.0)
    target: str = ""

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the hidden layers."""
        return tuple(len(b) for _, b in self.weights[:-1])

    @property
    def outputs(self) -> int:
        """Number of outputs of the network: one for two classes and for regression."""
        return len(self.weights[-1][1])

    def logits(self, values: np.ndarray) -> np.ndarray:
        """Outputs for raw values.  # records x columns -> records x outputs, float64"""
        parts = [self.forward(self.encoder.transform(values[i : i + _ROWS])) for i in range(0, len(values), _ROWS)]
        return np.concatenate(parts) if parts else np.zeros((0, self.outputs))

    def forward(self, h: np.ndarray) -> np.ndarray:
        """Outputs for encoded features.  # records x features -> records x outputs, float64"""
        x = h.astype(np.float64)  # so that one row alone and in a batch agree to the last digit that matters
        for k, (w, b) in enumerate(self.weights):
            x = (np.maximum(x, 0.0) if k else x) @ w.T.astype(np.float64) + b
        return x

    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """Class probabilities for raw values.  # records x columns -> records x classes"""
        z = self.logits(values)
        if self.outputs == 1:
            z = np.concatenate([-z / 2, z / 2], axis=1)  # the softmax of these is the sigmoid of z
        z = np.exp(z - z.max(axis=1, keepdims=True))
        return z / z.sum(axis=1, keepdims=True)

    def regress(self, values: np.ndarray) -> np.ndarray:
        """Predicted numbers for raw values."""
        low, high = self.target_range
        return np.clip((low + high) / 2 + self.logits(values)[:, 0] * (high - low) / 2, low, high)

    # -- what leaves this process ----------------------------------------------------------------------------------

    def tensors(self) -> dict[str, np.ndarray]:
        """Weights under the names they have in `weightclip.models.MLP`."""
        return {f"layers.{2 * k}.{name}": value
                for k, layer in enumerate(self.weights) for name, value in zip(("weight", "bias"), layer, strict=True)
        }  # fmt: skip

    def to_torch(self) -> MLP:
        """The network on features (`encoder.transform`) as a plain module."""
        import torch

        module = MLP(self.encoder.width, self.hidden, self.outputs)
        module.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in self.tensors().items()})
        return module.eval()

    def pipeline(self) -> dict[str, Any]:
        """A JSON-ready description of all but the weights."""
        return {
            "task": self.task, "target": self.target, "columns": self.encoder.to_json(),
            "shift": self.encoder.shift_json(), "hidden": list(self.hidden),
            "outputs": self.outputs, "classes": [_plain(c) for c in self.classes],
            "target_range": list(self.target_range),
        }  # fmt: skip

    @classmethod
    def load(cls, tensors: dict[str, np.ndarray], pipeline: dict[str, Any]) -> Model:
        """Rebuild a model from its weights and its description, checking that they belong together."""
        try:
            encoder = Encoder.from_json(pipeline["columns"], pipeline["shift"])
            sizes = [encoder.width, *map(int, pipeline["hidden"]), int(pipeline["outputs"])]
            weights = []
            for k, (before, after) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
                w, b = (np.asarray(tensors[f"layers.{2 * k}.{name}"], dtype=np.float32) for name in ("weight", "bias"))
                if w.shape != (after, before) or b.shape != (after,):
                    raise WeightclipError(f"model: layer {k} has shape {w.shape}, its pipeline says {(after, before)}.")
                weights.append((w, b))
            low, high = map(float, pipeline["target_range"])
            return cls(encoder, tuple(weights), pipeline["task"], tuple(pipeline["classes"]), (low, high),
                       str(pipeline["target"]))  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, WeightclipError):
                raise
            raise WeightclipError(f"model: its pipeline is not complete ({type(error).__name__}: {error}).") from error


def fold(weights: Sequence[tuple[Any, Any]], temperature: float) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Trained weights as arrays, with the last layer divided by the temperature."""
    arrays = [(w.numpy().copy(), b.numpy().copy()) for w, b in weights]
    w, b = arrays[-1]
    arrays[-1] = (w / np.float32(temperature), b / np.float32(temperature))
    return tuple(arrays)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return (
        value
        if isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
        else str(value)
    )
