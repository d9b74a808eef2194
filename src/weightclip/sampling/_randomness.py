"""Random numbers of the user's own code (dropout, augmentation): drawn from streams that nobody knows.

Masks from one known stream for a whole batch let one record change everybody's masks: 17 Delta were measured. Drawn
from secret streams they make a mixture of private releases, which is private too (SOUNDNESS section 10). So torch's,
NumPy's and Python's generators are set from the run's secret root while the model or the data set runs, and the user's
own states are given back afterwards: ``torch.manual_seed(42)`` in the loop changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weightclip.errors import ContractError
from weightclip.factors import is_plain
from weightclip.noise import philox

FORWARD = "weightclip/forward"
_numpy: Any = np.random  # its stubs miss a few names
_WORDS = 624  # of a Mersenne Twister
_END = _WORDS.to_bytes(4, sys.byteorder)  # the place behind the last of them: new ones are made before the next draw
_FIRST = 24  # bytes of torch's CPU state before them; each takes eight


class Generators:
    """torch's (CPU, and one CUDA device), NumPy's and Python's global generators, to be taken and given back.

    Formal guarantees:
        :meth:`seed` sets the whole state of every generator from a key of 256 bits by Philox (CUDA: 128 bits, seed and
        offset): what they yield is a function of the key alone. :meth:`restore` gives back the states of :meth:`save`,
        bit for bit.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.cuda = device if device is not None and device.type == "cuda" else None
        self._template = torch.Generator().manual_seed(0).get_state()
        self._words = self._template.numpy()[_FIRST : _FIRST + 8 * _WORDS].view(np.uint64)
        self._numpy: list[_Twister] = []  # one for each time they were taken and not given back
        self._spare: list[_Twister] = []

    def save(self) -> tuple[Any, ...]:
        """Take the generators: their present states, to be given back. NumPy's bits are set aside as they are."""
        cpu, python = torch.default_generator.get_state(), random.getstate()
        bits, pair = _numpy.get_bit_generator(), _numpy_pair()
        self._numpy.append(_Twister() if not self._spare else self._spare.pop())
        _numpy.set_bit_generator(self._numpy[-1].bits)
        return cpu, python, bits, pair, self._cuda_state()

    def restore(self, states: tuple[Any, ...]) -> None:
        """Give back what :meth:`save` found."""
        cpu, python, bits, pair, cuda = states
        torch.default_generator.set_state(cpu)
        random.setstate(python)
        _numpy.set_bit_generator(bits)
        self._spare.append(self._numpy.pop())
        if pair["has_gauss"]:  # the other half of a pair of normals, which NumPy keeps beside the bits
            np.random.set_state({**np.random.get_state(legacy=False), **pair})  # type: ignore[arg-type]
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.cuda)  # type: ignore[arg-type]

    def seed(self, key: bytes) -> None:
        """Set every generator from ``key``; only after :meth:`save`."""
        key = key if len(key) == 32 else hashlib.blake2b(key, digest_size=32).digest()
        philox.reset(key, 0)
        words = philox.bits.random_raw(_WORDS + 8).view(np.uint32)
        self._words[:] = words[:_WORDS]
        torch.default_generator.set_state(self._template)  # copies; its words are twisted before the first draw
        _numpy.set_bit_generator(self._numpy[-1].bits)  # drops half of a pair of normals
        self._numpy[-1].seed(words[_WORDS : 2 * _WORDS].tobytes())
        rest = words[2 * _WORDS :].tobytes()
        random.seed(rest[:48])
        if self._reaches_cuda():
            state = bytearray(rest[48:64])
            state[8] &= 0xFC  # offsets count in fours
            state[15] &= 0x0F
            torch.cuda.set_rng_state(torch.frombuffer(state, dtype=torch.uint8), self.cuda)  # type: ignore[arg-type]

    def look(self) -> list[Any]:
        """Everything the generators' next numbers depend on, to be compared."""
        numpy = np.random.get_state(legacy=False)
        parts = [torch.default_generator.get_state().numpy().tobytes(), random.getstate(), repr(sorted(_flat(numpy)))]
        cuda = self._cuda_state()
        return [*parts, None if cuda is None else cuda.numpy().tobytes()]

    def _cuda_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self.cuda) if self._reaches_cuda() else None  # type: ignore[arg-type]

    def _reaches_cuda(self) -> bool:
        # a graph that is being recorded holds no model that draws (FusedStep), and lets nobody set its generator
        return self.cuda is not None and not torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def given_back(generators: Generators) -> Iterator[None]:
    """The user's states are what they were, whatever happens inside."""
    states = generators.save()
    try:
        yield
    finally:
        generators.restore(states)


class ForwardRandomness:
    """Hooks of the model: its forward draws from a secret stream of its own, keyed by charge number and piece.

    ``before`` and ``after`` go on the model as a forward pre-hook and an always-called forward hook. They act wherever
    a record's contribution is made: with gradients, or in training mode.

    Formal guarantees:
        Masks are a function of (secret root, charge number, piece, number of the call): of no generator the user has
        set, and independent of the data. A pass of which ``idle`` knows, from its inputs, that no code in it can draw
        is left alone. Under torch.compile they act where a probe at make_private saw the model draw (and break the
        graph there); a model that draws only in branches the probe did not take is not found.
    """

    def __init__(
        self, device: torch.device, key: Callable[[int], bytes], draws: bool, idle: Callable[[tuple[Any, ...]], bool]
    ) -> None:
        self.generators, self.key, self.draws, self.idle = Generators(device), key, draws, idle
        self._stack: list[Any] = []
        self._owner: int | None = None
        self.calls = 0  # over the present batch

    def next_batch(self, calls: int = 0) -> None:
        """A new physical batch: its calls are counted from zero, and nothing is left of an interrupted one."""
        self.calls, self._owner = calls, None
        self._stack.clear()

    def enter(self) -> None:
        """Take the generators."""
        thread = threading.get_ident()
        if self._stack and self._owner != thread:
            raise ContractError("two threads run the private model at once: their dropout masks would mix; use one.")
        # inside another pass the states to give back are those of that pass
        self._stack.append(self.generators.save())
        self._owner = thread
        self.calls += 1
        self.generators.seed(self.key(self.calls))

    def leave(self) -> None:
        """Give them back; nothing happens where they were not taken."""
        if self._stack and self._owner == threading.get_ident():
            self.generators.restore(self._stack.pop())

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """For other work on the records that may draw, such as a backward pass that computes activations again."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def hooks(self) -> tuple[ForwardHook, ForwardHook]:
        """The pre-hook and the hook behind the model."""
        return ForwardHook(self, True), ForwardHook(self, False)


@torch.compiler.disable
def _break(act: Callable[[], None]) -> None:
    """Outside the compiled graph, which ends here."""
    act()


class ForwardHook:
    """One end of the model's forward."""

    _weightclip = True

    def __init__(self, randomness: ForwardRandomness | None, first: bool) -> None:
        self.randomness = None if randomness is None else weakref.ref(randomness)
        self.draws, self.first = randomness is not None and randomness.draws, first

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], *_: Any) -> None:
        if is_plain() or not (torch.is_grad_enabled() or module.training):
            return
        if not torch.compiler.is_compiling():
            self._act(inputs)
        elif self.draws:
            _break(self._act)

    def _act(self, inputs: tuple[Any, ...] | None = None) -> None:
        randomness = None if self.randomness is None else self.randomness()
        if randomness is None:
            return
        if not self.first:
            randomness.leave()
        elif inputs is None or not randomness.idle(inputs):
            randomness.enter()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHook:
        return ForwardHook(None, self.first)  # copies and saved models leave the engine behind

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardHook, (None, self.first)


def model_draws(model: nn.Module, run: Callable[[nn.Module], Any]) -> bool:
    """Whether a forward in training mode, or in the present one, moves a generator; a pass that fails counts as yes.

    Buffers are cloned for the passes and every generator gets its state back.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    generators = Generators(device)
    modes = {module: module.training for module in model.modules()}
    kept = [(b, b.detach().clone()) for b in model.buffers()]

    def moves() -> bool:
        generators.seed(b"probe")
        before = generators.look()
        run(model)
        return before != generators.look()

    try:
        with given_back(generators), torch.no_grad():
            if moves():
                return True
            for module in modes:
                module.training = True
            return moves()
    except Exception:
        return True
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


class _Twister:
    """A bit generator for NumPy whose whole state is written at once: its own setter takes 40 microseconds."""

    def __init__(self) -> None:
        self.bits = np.random.MT19937(0)
        state = (ctypes.c_uint32 * (_WORDS + 1)).from_address(self.bits.ctypes.state_address)
        self._memory = memoryview(state).cast("B")  # written by a slice, which other threads wait for
        words = bytes(range(256)) * 9 + bytes(192)
        self._at_once = True
        self.seed(words)
        state: Any = self.bits.state["state"]
        self._at_once = state["pos"] == _WORDS and state["key"].astype("<u4").tobytes() == words  # as it is laid out

    def seed(self, words: bytes) -> None:
        """Set all words of the state."""
        if self._at_once:
            self._memory[:] = words + _END
        else:
            state: Any = {"key": np.frombuffer(words, "<u4"), "pos": _WORDS}
            self.bits.state = {"bit_generator": "MT19937", "state": state}


class _NoBits:
    """Stands for NumPy's bits while its state is asked for: copying them takes 30 times as long as all the rest."""

    state = {"bit_generator": "MT19937"}  # noqa: RUF012


def _numpy_pair() -> dict[str, Any]:
    """What NumPy's global generator keeps beside its bits: half of a pair of normals, if it has one left."""
    legacy, bits = _numpy.mtrand._rand, _numpy.get_bit_generator()
    try:
        legacy._bit_generator = _NoBits
        state = legacy.get_state(legacy=False)
    except (AttributeError, TypeError, KeyError):  # another NumPy
        state = None
    finally:
        legacy._bit_generator = bits
    state = np.random.get_state(legacy=False) if state is None else state
    return {name: state[name] for name in ("has_gauss", "gauss")}  # type: ignore[index]


def _flat(state: Any) -> Iterator[tuple[str, str]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield name, value.tobytes().hex() if isinstance(value, np.ndarray) else repr(value)
