"""Recurrent layers: a scan over input gates that are computed at once (SOUNDNESS section 12).

cuDNN hides the gradients of the gates. Here the input's product is one dense product over all steps, and so is the
hidden state's: its cotangents are read off at the gates, its inputs are the hidden states the scan went through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from weightclip.errors import ContractError
from weightclip.factors._copies import Copied
from weightclip.factors._dense import DENSE
from weightclip.factors._part import Part, part_of
from weightclip.factors._passes import collect
from weightclip.factors._routes import dense
from weightclip.factors._swap import FORMS, Private, is_active


class _Held:
    """The inputs of a product that are known only after its outputs were handed out."""

    x: Tensor | None = None


class _TapFunction(torch.autograd.Function):
    """Zeros that are added to a product's output: their gradient is the product's cotangent."""

    @staticmethod
    def forward(ctx, token, key, anchor, held, like, width):
        """(records, steps, width) zeros."""
        ctx.key, ctx.held = key, held
        ctx.save_for_backward(token)
        return like.new_zeros(*like.shape[:2], width)

    @staticmethod
    def backward(ctx, d):
        """Both factors are known now."""
        collect(ctx.key, ctx.saved_tensors[0], ctx.held.x, d)
        return (None,) * 6


class _Tapped:
    """y_t = W x_t + bias, one step at a time, as one product over all steps."""

    def __init__(self, part: Part, like: Tensor) -> None:
        self.weight, self.bias = part.weight.detach(), None if part.bias is None else part.bias.detach()
        self.held, self.inputs = _Held(), list[Tensor]()
        sink = part._wc_sink
        assert sink is not None and sink.passes is not None
        width = self.weight.shape[0]
        if sink.passes.noting is not None:
            if not sink.passes.deep:
                shape = (*like.shape[:2], self.weight.shape[1])
                sink.passes.note(part, shape, f"parameter '{part.name}' of a {type(part.layer)._wc_native.__name__}")
            self.taps = like.new_zeros(*like.shape[:2], width).unbind(1)
        else:
            taps: Any = _TapFunction.apply(part._wc_token, sink.key, sink.anchor, self.held, like.detach(), width)
            self.taps = taps.unbind(1)

    def __call__(self, x: Tensor, step: int) -> Tensor:
        self.inputs.append(x.detach())
        return F.linear(x, self.weight, self.bias) + self.taps[step]

    def close(self, backwards: bool) -> None:
        """All steps are done."""
        self.held.x = torch.stack(self.inputs[::-1] if backwards else self.inputs, 1)


State = tuple[Tensor, ...]


def _lstm(gates: Tensor, hidden: Tensor, state: State) -> State:
    i, f, g, o = (gates + hidden).chunk(4, 1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(gates: Tensor, hidden: Tensor, state: State) -> State:
    (r, z, n), (hr, hz, hn) = gates.chunk(3, 1), hidden.chunk(3, 1)
    z, n = torch.sigmoid(z + hz), torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (n + z * (state[0] - n),)


def _rnn(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, State], State]:
    return lambda gates, hidden, state: (function(gates + hidden),)


class _Recurrent(Private):
    """nn.LSTM, nn.GRU and nn.RNN."""

    _wc_form = DENSE

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Native outputs and states."""
        layer: Any = self
        if not is_active(self):
            return self._wc_native.forward(self, input, hx)  # type: ignore[arg-type]
        name = self._wc_native.__name__
        if isinstance(input, PackedSequence):
            raise ContractError(
                f"{name} got a PackedSequence, whose rows are steps of several records: pad the sequences to a public "
                "length and pass them as one tensor (pad_packed_sequence, or leave packing out)."
            )
        if isinstance(input, Copied) or input.dim() != 3:
            raise ContractError(f"{name} needs batches of sequences: three dimensions, one of them the records.")
        x = input if layer.batch_first else input.transpose(0, 1)
        tupled = layer.mode == "LSTM"
        given = None if hx is None else tuple(hx) if tupled else (hx,)
        ends: list[State] = []
        for k in range(layer.num_layers):
            outputs = []
            for backwards in range(2 if layer.bidirectional else 1):
                start = None if given is None else tuple(h[len(ends)] for h in given)
                steps, end = self._scan(x, k, bool(backwards), start)
                outputs.append(steps)
                ends.append(end)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if layer.dropout and layer.training and k + 1 < layer.num_layers:
                x = F.dropout(x, layer.dropout, True)
        states = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        return x if layer.batch_first else x.transpose(0, 1), states if tupled else states[0]

    def _scan(self, x: Tensor, k: int, backwards: bool, start: State | None) -> tuple[Tensor, State]:
        """One layer in one direction: all steps' outputs and the last state."""
        layer: Any = self
        end = f"_l{k}" + ("_reverse" if backwards else "")

        def part(kind: str, bias: bool) -> Part:
            return part_of(self, DENSE, f"weight_{kind}{end}", f"bias_{kind}{end}" if bias else None)

        step = {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": _rnn(torch.tanh), "RNN_RELU": _rnn(torch.relu)}[layer.mode]
        gates = dense(part("ih", layer.bias), x)
        recurrent = _Tapped(part("hh", layer.bias), gates)
        projected = _Tapped(part("hr", False), gates) if layer.proj_size else None
        if start is None:
            zeros = gates.new_zeros(len(gates), layer.hidden_size)
            start = (zeros[:, : layer.proj_size or layer.hidden_size], zeros)[: 2 if layer.mode == "LSTM" else 1]
        state, outputs, steps = start, [], list(enumerate(gates.unbind(1)))
        for t, gate in reversed(steps) if backwards else steps:
            state = step(gate, recurrent(state[0], t), state)
            if projected is not None:
                state = (projected(state[0], t), state[1])
            outputs.append(state[0])
        for tap in (recurrent, projected) if projected is not None else (recurrent,):
            tap.close(backwards)
        return torch.stack(outputs[::-1] if backwards else outputs, 1), state


class _Cell(Private):
    """nn.LSTMCell, nn.GRUCell and nn.RNNCell: one step, two dense products."""

    _wc_form = DENSE

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Native state."""
        layer: Any = self
        if not is_active(self):
            return self._wc_native.forward(self, input, hx)  # type: ignore[arg-type]
        if isinstance(input, Copied) or input.dim() != 2:
            raise ContractError(f"{self._wc_native.__name__} needs batches: two dimensions, the first of them records.")
        zeros = input.new_zeros(len(input), layer.hidden_size)
        tupled = isinstance(layer, nn.LSTMCell)
        state = (zeros, zeros) if hx is None else tuple(hx) if tupled else (hx,)
        gates, hidden = (
            dense(part_of(self, DENSE, f"weight_{kind}", f"bias_{kind}" if layer.bias else None), x)
            for kind, x in (("ih", input), ("hh", state[0]))
        )
        state = self._step()(gates, hidden, state)
        return state if tupled else state[0]

    def _step(self) -> Callable[[Tensor, Tensor, State], State]:
        layer: Any = self
        if isinstance(layer, nn.RNNCell):
            return _rnn(torch.tanh if layer.nonlinearity == "tanh" else torch.relu)
        return _lstm if isinstance(layer, nn.LSTMCell) else _gru


FORMS.update(dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), _Cell))
FORMS.update(dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _Recurrent))
