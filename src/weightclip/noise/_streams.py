"""The randomness of one run: a secret (or seeded) root, and a named stream for everything that is drawn.

Sampling depends on (root, charge number), noise on that and on fresh bits of the operating system, or in a seeded run
on digests of the weights and of the sum it is added to. All are derived from the root by a keyed hash of a label and
some integers, so that no two purposes ever share a stream and nothing depends on the order of calls, on the number of
records, or on the number of workers and threads (SOUNDNESS Theorem 30).
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import secrets
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightclip.errors import WeightclipError

NOISE = "noise"
SAMPLING = "sampling"

_MASK64 = (1 << 64) - 1
_BLOCK = 1 << 18  # numbers per Philox sub-stream: fixed, so that results do not depend on the number of threads
_NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


class _Philox(threading.local):
    """One reusable bit generator per thread: making a new one costs more than drawing 1,000 numbers."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.rng = np.random.Generator(self.bits)
        self.words: dict[str, Any] = {}
        # The setter copies, so one dictionary serves every reset.
        self.state: Any = {
            "bit_generator": "Philox",
            "state": self.words,
            "buffer": (0, 0, 0, 0),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def reset(self, key: bytes, block: int) -> np.random.Generator:
        h0, h1, h2, h3 = struct.unpack("<4Q", key)
        self.words["key"] = (h0, h1)
        self.words["counter"] = (0, block, h2, h3)  # 2^64 counters a block: the blocks of one key never overlap
        self.bits.state = self.state
        return self.rng


philox = _Philox()


class _Cuda(threading.local):
    """Two reusable generators per thread and device, seeded anew for every use: no other thread may come in between."""

    def __init__(self) -> None:
        self.made: dict[torch.device, list[torch.Generator]] = {}

    def generators(self, device: torch.device) -> list[torch.Generator]:
        if device not in self.made:
            self.made[device] = [torch.Generator(device=device) for _ in range(2)]
        return self.made[device]


_cuda = _Cuda()


class Streams:
    """All random numbers of a run, derived from one 256-bit root.

    Make one with :meth:`secure` (the default of the engine) or :meth:`seeded` (reproducible, for experiments).

    Formal guarantees:
        Draws are a deterministic function of (root, label, integers), and draws with different labels or integers are
        independent as far as keyed BLAKE2b and Philox are pseudo-random. With :meth:`secure` the root holds 256 bits
        of the operating system's randomness and is never written anywhere; on the CPU every stream carries 256 bits
        of it (128 in Philox's key, 128 in its counter), on CUDA 128 bits (two generators of 64). With :meth:`seeded`
        the guarantee holds only against someone who cannot guess the seed. Philox is a statistical generator, not a
        cipher. Asking twice for the same label and integers gives the same numbers: whoever releases two different
        sums under one (label, step, parameter) reveals their difference, so noise comes from :meth:`for_release`.
    """

    __slots__ = ("_root", "_seed", "_path", "__weakref__")

    def __init__(self, root: bytes, *, seed: int | None = None, path: tuple[int, ...] | None = ()) -> None:
        if len(root) != 32:
            raise WeightclipError(f"Streams: the root must be 32 bytes, got {len(root)}; use Streams.secure().")
        self._root = root
        self._seed = seed
        self._path = path

    @classmethod
    def secure(cls) -> Streams:
        """A root of 256 bits from the operating system."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def seeded(cls, generator: torch.Generator | int) -> Streams:
        """A root from a seed; nothing is drawn from the generator, and all 64 bits of its initial seed count."""
        seed = generator.initial_seed() if isinstance(generator, torch.Generator) else int(generator)
        if not -(1 << 63) <= seed <= _MASK64:
            raise WeightclipError(f"Streams.seeded: the seed must fit in 64 bits, got {seed}.")
        seed &= _MASK64
        root = hashlib.blake2b(struct.pack("<Q", seed), digest_size=32, person=b"wclip-seeded").digest()
        return cls(root, seed=seed)

    def shared(self, tell: Callable[[Callable[[], bytes]], bytes]) -> Streams:
        """Streams of all processes of a run: those of the first one, which ``tell`` hands to the others.

        Formal guarantees:
            Draws and masks of all processes come from one root, which exists in their memory and in their messages
            alone. Noise is not drawn from it by several processes: one makes it, for all.
        """
        return Streams(tell(lambda: self._root), path=self._path) if self.is_secure else self

    def of_first(self, tell: Callable[[Callable[[], bytes]], bytes]) -> Streams:
        """Streams for one release, which several processes make together: those of the first one.

        Formal guarantees:
            Every process has the same numbers; each uses those of the entries that it alone releases.
        """
        return Streams(tell(lambda: self._root), seed=self._seed, path=self._path)

    def child(self, label: str, *ints: int) -> Streams:
        """Streams of their own for a part of a run, as secure as these."""
        return Streams(self.key(label, *ints), seed=self._seed, path=None)

    @property
    def is_secure(self) -> bool:
        """True when the root comes from the operating system and cannot be saved."""
        return self._seed is None

    @property
    def needs_content(self) -> bool:
        """Whether the noise of a release cannot be drawn before its sum is known."""
        return self._seed is not None

    def key(self, label: str, *ints: int) -> bytes:
        """The 32 bytes that belong to a label and some 64-bit integers."""
        name = label.encode()
        try:
            message = struct.pack(f"<I{len(name)}s{len(ints)}q", len(name), name, *ints)
        except struct.error as error:
            raise WeightclipError(f"Streams.key({label!r}): {ints} must be integers of at most 63 bits.") from error
        return hashlib.blake2b(message, key=self._root, digest_size=32).digest()

    def numpy(self, label: str, *ints: int) -> np.random.Generator:
        """A fresh NumPy generator for a label: 128 bits of the hash in Philox's key, 128 in its counter."""
        words = np.frombuffer(self.key(label, *ints), dtype="<u8").astype(np.uint64)
        counter = np.array([0, 0, words[2], words[3]], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=words[:2], counter=counter))

    def normal_(self, out: Tensor, label: str, *ints: int) -> Tensor:
        """Fills a flat float32 or float64 buffer with standard normals, and returns it.

        On the CPU the numbers are written straight into the tensor's memory, in blocks of 2^18 that are drawn in
        parallel when torch may use several threads; on CUDA nothing waits for the device. Numbers are the same for
        every number of threads; they differ between CPU and CUDA, and between dtypes.
        """
        dtype = _NUMPY_DTYPES.get(out.dtype)
        if dtype is None or out.dim() != 1 or not out.is_contiguous():
            raise WeightclipError(
                "Streams.normal_: needs a contiguous 1-D float32 or float64 buffer, "
                f"got {out.dtype} of shape {tuple(out.shape)}."
            )
        key = self.key(label, *ints)
        out = out.detach()
        if out.device.type == "cuda":
            generators = _cuda.generators(out.device)[: 2 if self.is_secure else 1]
            for generator, seed in zip(generators, self.seeds(label, *ints), strict=False):
                generator.manual_seed(seed)
            return fill_normal_(out, generators)
        if out.device.type != "cpu":
            return out.copy_(_normal_cpu_(torch.empty(out.shape, dtype=out.dtype), dtype, key))
        return _normal_cpu_(out, dtype, key)

    def numbers(self, dtype: torch.dtype, label: str, *ints: int) -> Numbers:
        """What :meth:`normal_` would fill a buffer on the CPU with, to be read in parts."""
        return Numbers(self.key(label, *ints), _NUMPY_DTYPES[dtype])

    def seeds(self, label: str, *ints: int) -> tuple[int, int]:
        """Two seeds of 64 bits that belong to a label and some integers, for CUDA generators."""
        return struct.unpack_from("<QQ", self.key(label, *ints))

    def advance(self, nonce: int) -> Streams:
        """A child with streams of its own, e.g. for a resumed run, whose replayed steps must not reuse old noise."""
        path = None if self._path is None else (*self._path, int(nonce))
        return Streams(self.key("weightclip/advance", int(nonce)), seed=self._seed, path=path)

    def settled(self, settings: bytes) -> Streams:
        """Streams of a run with these settings; secure ones belong to one run anyway."""
        if self.is_secure:
            return self
        streams = self
        for word in struct.unpack("<4q", settings):
            streams = streams.advance(word)
        return streams

    def for_release(self, charge: int, content: Callable[[], bytes]) -> Streams:
        """Streams for the noise of one release alone.

        Args:
            charge: The number the release is charged under.
            content: Asked in a seeded run only: a digest of the weights and of the sum that will be released.

        Formal guarantees:
            The noise never meets two different sums. Secure: 256 fresh bits of the operating system go into every
            call, so that neither a rewound counter nor a forked process finds the same noise again. Seeded: the noise
            is a function of (root, charge, content), and two releases that share it are the same release.
        """
        message = content() if self.needs_content else secrets.token_bytes(32)
        root = hashlib.blake2b(
            struct.pack("<q", charge) + message, key=self._root, digest_size=32, person=b"wclip-release"
        )
        return Streams(root.digest(), seed=self._seed, path=None)

    def state(self) -> dict[str, Any]:
        """What :meth:`from_state` needs to rebuild seeded streams (JSON-ready); secure streams refuse."""
        if self._seed is None:
            raise WeightclipError(
                "Secure randomness is never saved: pass generator= for a run that can be resumed exactly, "
                "or resume with fresh noise."
            )
        if self._path is None:
            raise WeightclipError("streams of a part of a run follow from those of the run: save these, and ask again.")
        return {"seed": self._seed, "path": list(self._path)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Streams:
        """Rebuilds seeded streams from :meth:`state`."""
        streams = cls.seeded(int(state["seed"]))
        for nonce in state.get("path", ()):
            streams = streams.advance(nonce)
        return streams

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is not None or self.is_secure:  # the latter refuse
            return Streams.from_state, (self.state(),)
        # from_state would make it the run's own
        return functools.partial(Streams, seed=self._seed, path=None), (self._root,)

    def __repr__(self) -> str:  # never shows the root
        return "Streams.secure()" if self.is_secure else f"Streams.seeded({self._seed})"


class Numbers:
    """The standard normals of one key, read in parts: a part is the same whoever reads it, and whatever else is read.

    Parts that are read in order cost their own numbers and at most two blocks of 2^18.
    """

    def __init__(self, key: bytes, dtype: Any) -> None:
        self._key, self._dtype = key, dtype
        self._block, self._held = -1, np.empty(0)

    def read_(self, out: Tensor, start: int) -> Tensor:
        """Fill a flat buffer on the CPU with the numbers from place ``start`` on."""
        array, done = out.numpy(), 0
        while done < array.size:
            block, begin = divmod(start + done, _BLOCK)
            count = min(_BLOCK - begin, array.size - done)
            if block != self._block:
                self._held = philox.reset(self._key, block).standard_normal(_BLOCK, dtype=self._dtype)
                self._block = block
            array[done : done + count] = self._held[begin : begin + count]
            done += count
        return out


def fill_normal_(out: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Standard normals on CUDA: a generator holds 64 bits, the sum of two needs both seeds."""
    share = 1.0 / math.sqrt(len(generators))
    out.normal_(std=share, generator=generators[0])
    for generator in generators[1:]:
        out.add_(torch.empty_like(out).normal_(std=share, generator=generator))
    return out


def _normal_cpu_(out: Tensor, dtype: Any, key: bytes) -> Tensor:
    array = out.numpy()
    blocks = -(-array.size // _BLOCK)

    def fill(block: int) -> None:
        part = array[block * _BLOCK : (block + 1) * _BLOCK]
        philox.reset(key, block).standard_normal(out=part, dtype=dtype)

    if blocks == 1:  # the usual case, and the one that must be cheap
        philox.reset(key, 0).standard_normal(out=array, dtype=dtype)
        return out
    threads = min(blocks, torch.get_num_threads(), os.cpu_count() or 1)
    if threads <= 1:
        for block in range(blocks):
            fill(block)
    else:  # a pool per call: one kept in the module would be dead after a fork
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, range(blocks)))
    return out
