"""The whole model, encoder included, as an ONNX graph written operator by operator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError
from weightclip.tabular._encoder import Pieces
from weightclip.tabular._model import Model


def to_onnx(model: Model, path: str | Path | None = None) -> Any:
    """An ONNX model with input "raw" (records x columns, double) and output "probabilities" or "prediction".

    The input holds numbers as they are and categories as codes (`Table.values`), NaN for missing.

    Args:
        model: The fitted model.
        path: Where to write it, if anywhere.

    Returns:
        An ``onnx.ModelProto``.
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

    encoder = model.encoder
    scale = 1 / math.sqrt(max(1, len(encoder.parts)))
    zero, one = constant(np.zeros((), np.float64)), constant(np.ones((), np.float64))
    features = []
    for j, part in enumerate(encoder.parts):
        x = node("Gather", "raw", constant(np.array([j])), axis=1)  # records x 1
        if isinstance(part, Pieces):
            edges = np.array(part.edges)
            # not finite in double: a cast to float would take 1e39 for infinite; NaN compares as false
            bad = node("Not", node("LessOrEqual", node("Abs", x), constant(np.array(np.finfo(np.float64).max))))
            clean = node("Where", bad, constant(edges[:1]), x)
            steps = node("Div", node("Sub", clean, constant(edges[:-1])), constant(np.diff(edges)))
            width = len(edges) - 1
            steps = node("Clip", steps, zero, one)
            steps = node("Sub", node("Mul", steps, constant(np.array(2.0))), one)
            steps = node("Mul", steps, constant(np.array(scale / math.sqrt(width))))
            features.append(node("Where", bad, zero, steps))
            if part.missing:
                features.append(node("Mul", node("Cast", bad, to=TensorProto.DOUBLE), constant(np.array(scale))))
        elif part.codes:
            codes = constant(np.array(part.codes, dtype=np.float64)[None, :])
            hit = node("Cast", node("Equal", x, codes), to=TensorProto.DOUBLE)
            features.append(node("Mul", hit, constant(np.array(scale))))
    h = node("Concat", *features, axis=1)
    h = node("Cast", h, to=TensorProto.FLOAT)
    if encoder.center:
        h = node("Sub", h, constant(np.array(encoder.center, np.float32)))
        h = node("Mul", h, constant(np.array(encoder.gain, np.float32)))
        radius = constant(np.array(encoder.radius, np.float32))
        norm = node("ReduceL2", h, axes=[1], keepdims=1)
        h = node("Mul", h, node("Div", radius, node("Max", norm, radius)))
    for k, (w, b) in enumerate(model.weights):
        h = node("Relu", h) if k else h
        h = node("Add", node("MatMul", h, constant(np.ascontiguousarray(w.T))), constant(b))
    if model.task == "classification":
        if model.outputs == 1:
            h = node(
                "Concat",
                node("Mul", h, constant(np.array(-0.5, np.float32))),
                node("Mul", h, constant(np.array(0.5, np.float32))),
                axis=1,
            )
        result, name = node("Softmax", h, axis=1), "probabilities"
        width = len(model.classes)
    else:
        low, high = model.target_range
        h = node(
            "Add",
            node("Mul", h, constant(np.array((high - low) / 2, np.float32))),
            constant(np.array((low + high) / 2, np.float32)),
        )
        result, name = (
            node("Clip", h, constant(np.array(low, np.float32)), constant(np.array(high, np.float32))),
            "prediction",
        )
        width = 1
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
