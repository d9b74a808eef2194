"""A fitted private model of a table: encoder and network, with everything prediction needs and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError
from weightclip.models import MLP
from weightclip.tabular._encoder import Encoder, Pieces

_ROWS = 1 << 14


@dataclass(frozen=True, eq=False)
class Model:
    """Encoder and dense network."""

    encoder: Encoder  # from raw values to features
    # (weight, bias) of every layer, float32, the temperature folded into the last one
    weights: tuple[tuple[np.ndarray, np.ndarray], ...]
    task: str  # "classification" or "regression"
    classes: tuple[Any, ...] = ()  # labels, in the order of the outputs
    target_range: tuple[float, float] = (0.0, 1.0)  # interval the target was scaled from; predictions stay inside
    target: str = ""  # name of the target column, for people

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
    plain = isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)


def to_onnx(model: Model, path: str | Path | None = None) -> Any:
    """An ONNX model with input "raw" (records x columns, double) and output "probabilities" or "prediction".

    The input holds numbers as they are and categories as codes (`Table.values`), NaN for missing.

    Returns an ``onnx.ModelProto``, and writes it to `path` if there is one.
    """
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError as error:
        raise WeightclipError("ONNX export needs the onnx package: pip install 'weightclip[onnx]'.") from error
    nodes: list[Any] = []
    constants: list[Any] = []

    def constant(value: np.ndarray) -> str:
        name = f"c{len(constants)}"
        constants.append(numpy_helper.from_array(value, name))
        return name

    def node(kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"n{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def number(value: float, kind: type = np.float32) -> str:
        return constant(np.array(value, kind))

    encoder = model.encoder
    scale = 1 / math.sqrt(max(1, len(encoder.parts)))
    zero, one = number(0.0, np.float64), number(1.0, np.float64)
    features = []
    for j, part in enumerate(encoder.parts):
        x = node("Gather", "raw", constant(np.array([j])), axis=1)  # records x 1
        if isinstance(part, Pieces):
            edges = np.array(part.edges)
            # not finite in double: a cast to float would take 1e39 for infinite; NaN compares as false
            bad = node("Not", node("LessOrEqual", node("Abs", x), number(np.finfo(np.float64).max, np.float64)))
            clean = node("Where", bad, constant(edges[:1]), x)
            steps = node("Div", node("Sub", clean, constant(edges[:-1])), constant(np.diff(edges)))
            width = len(edges) - 1
            steps = node("Clip", steps, zero, one)
            steps = node("Sub", node("Mul", steps, number(2.0, np.float64)), one)
            steps = node("Mul", steps, number(scale / math.sqrt(width), np.float64))
            features.append(node("Where", bad, zero, steps))
            if part.missing:
                features.append(node("Mul", node("Cast", bad, to=TensorProto.DOUBLE), number(scale, np.float64)))
        elif part.codes:
            codes = constant(np.array(part.codes, dtype=np.float64)[None, :])
            hit = node("Cast", node("Equal", x, codes), to=TensorProto.DOUBLE)
            features.append(node("Mul", hit, number(scale, np.float64)))
    h = node("Concat", *features, axis=1)
    h = node("Cast", h, to=TensorProto.FLOAT)
    if encoder.center:
        h = node("Sub", h, constant(np.array(encoder.center, np.float32)))
        h = node("Mul", h, number(encoder.gain))
        radius = number(encoder.radius)
        norm = node("ReduceL2", h, axes=[1], keepdims=1)
        h = node("Mul", h, node("Div", radius, node("Max", norm, radius)))
    for k, (w, b) in enumerate(model.weights):
        h = node("Relu", h) if k else h
        h = node("Add", node("MatMul", h, constant(np.ascontiguousarray(w.T))), constant(b))
    if model.task == "classification":
        if model.outputs == 1:
            h = node("Concat", node("Mul", h, number(-0.5)), node("Mul", h, number(0.5)), axis=1)
        result, name, width = node("Softmax", h, axis=1), "probabilities", len(model.classes)
    else:
        low, high = model.target_range
        h = node("Add", node("Mul", h, number((high - low) / 2)), number((low + high) / 2))
        result, name, width = node("Clip", h, number(low), number(high)), "prediction", 1
    nodes.append(helper.make_node("Identity", [result], [name]))
    graph = helper.make_graph(
        nodes, "weightclip",
        [helper.make_tensor_value_info("raw", TensorProto.DOUBLE, ["records", len(encoder.parts)])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["records", width])],
        constants,
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="weightclip")
    proto.ir_version = 8
    onnx.checker.check_model(proto)
    if path is not None:
        onnx.save(proto, str(path))
    return proto
