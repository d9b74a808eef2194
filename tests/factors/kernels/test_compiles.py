"""The kernels compile for GPUs that are not here, use their tensor cores, fit into their memory and keep to registers.

Triton's interpreter shows what they compute. What it does not show is whether a GPU's compiler takes them: shapes of
products, memory that programs share, registers that run out. Triton's own compiler and disassembler run without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.triton_kit import INTERPRETED
from torch import Tensor

from weightclip.factors.kernels import _one_launch, _products, _products_totals, _tiles

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="where kernels run they are compiled anyway"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

SHARED = {80: 101_376, 90: 232_448}  # bytes that a program may share with itself: of 8.6 and 8.9, and of 9.0
STACK = {80: 512, 90: 64}  # bytes of a thread that are not in registers, in wide float64 sums of tiles
FILES = ("_one_launch_triton", "_products_triton", "_tiles_triton", "_tiles_planes_triton")
SAME = _tiles.Window((3, 3), padding=(1, 1))


class Compiled(NamedTuple):
    """One compiled variant."""

    kernel: str
    shared: int
    stack: int
    operators: frozenset[str]


class Absent:
    """Stands for the driver of a GPU."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.capability, self.target = capability, GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it has compiled by the number of the device

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def tool(name: str, *options: str) -> str:
    """What one of the tools that come with Triton prints."""
    backend = importlib.import_module("triton.backends.nvidia")
    path = Path(str(backend.__file__)).parent / "bin" / name
    if not path.exists():
        pytest.skip(f"this Triton brings no {name}")
    return subprocess.run([str(path), *options], capture_output=True, text=True, check=True).stdout


def looked_at(kernel: str, compiled: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = tool("cuobjdump", "--dump-resource-usage", file.name), tool("nvdisasm", "-c", file.name)
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    return Compiled(kernel, compiled.metadata.shared, int(stack), frozenset(re.findall(r"\b[HD]G?MMA\b", code)))


@pytest.fixture(params=list(SHARED))
def capability(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def compiled(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """What was launched inside, compiled for this capability instead; tensors pass for CUDA tensors."""
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    found: list[Compiled] = []

    def launch(kernel: Any, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        mock = [MockTensor(a.dtype, list(a.shape)) if isinstance(a, Tensor) else a for a in args]
        found.append(looked_at(kernel.__name__, kernel.warmup(*mock, grid=grid, **options)))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module in (_one_launch, _products, _products_totals, _tiles):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(_tiles, "_processors", lambda device: 132)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(driver, "_active", Absent(capability))
    return found


def plain(*shape: int) -> Tensor:
    return torch.zeros(shape)


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last)


ONES, LIMITS, ENDS = torch.ones(64), torch.ones(3), torch.ones(3, dtype=torch.int64)
IMAGES = (64, 64, 16, 16), (64, 128, 16, 16)
DEEP = (64, 128, 8, 8), (64, 128, 8, 8)
TOKENS = (64, 128, 256), (64, 128, 192)
POINT = (1, 1), (1, 1), (0, 0), (1, 1)

ON_TENSOR_CORES: dict[str, Callable[[], Any]] = {
    "dense, groups": lambda: _tiles.tile_sums(half(*TOKENS[0]), half(*TOKENS[1]), ONES, group=32),
    "dense": lambda: _tiles.tile_sums(half(*TOKENS[0]), half(*TOKENS[1]), ONES),
    "dense, norms": lambda: _tiles.tile_norms(half(*TOKENS[0]), half(*TOKENS[1]), 1.0),
    "convolution": lambda: _tiles.tile_sums(last(half(*IMAGES[0])), last(half(*IMAGES[1])), ONES, SAME),
    "convolution, norms": lambda: _tiles.tile_norms(last(half(*IMAGES[0])), last(half(*IMAGES[1])), 0.0, SAME),
    "few positions": lambda: _tiles.tile_sums(last(half(*DEEP[0])), last(half(*DEEP[1])), ONES, SAME),
    "few positions, norms": lambda: _tiles.tile_norms(last(half(*DEEP[0])), last(half(*DEEP[1])), 1.0, SAME),
    "TF32": lambda: _tiles.tile_sums(plain(*IMAGES[0]), plain(*IMAGES[1]), ONES, SAME),
    "TF32, norms": lambda: _tiles.tile_norms(plain(*IMAGES[0]), plain(*IMAGES[1]), 1.0, SAME),
    "TF32, few positions, norms": lambda: _tiles.tile_norms(plain(*DEEP[0]), plain(*DEEP[1]), 1.0, SAME),
    "TF32, channels last": lambda: _tiles.tile_sums(last(plain(*IMAGES[0])), last(plain(*IMAGES[1])), ONES, SAME),
    "TF32, first layer": lambda: _tiles.tile_sums(plain(64, 3, 32, 32), plain(64, 16, 32, 32), ONES, SAME),
    "float64": lambda: _products.weight_gradient(
        plain(*DEEP[0]), plain(*DEEP[1]), ONES, (3, 3), (1, 1), (1, 1), (1, 1), bias=True
    ),
    "float64, norms": lambda: _products.gradient_squares(
        plain(*DEEP[0]), plain(*DEEP[1]), (3, 3), (1, 1), (1, 1), (1, 1)
    ),
}  # fmt: skip
OTHERS: dict[str, Callable[[], Any]] = {
    "scales": lambda: _products.fused_scale(plain(64, 100), plain(64, 20), LIMITS, 3, 1.0),
    "scales of few large records": lambda: _products.fused_scale(plain(2, 99_999), plain(2, 99_999), LIMITS, 4, 1.0),
    "scales and sums": lambda: _products_totals.scale_and_totals(half(*TOKENS[0]), half(*TOKENS[1]), LIMITS, 3, 1.0),
    "sums": lambda: _products.record_sums(plain(64, 20, 9), ONES, plain(64, 20, 9)),
    "sums by records": lambda: _products.record_sums(plain(64, 64, 20).transpose(1, 2), ONES),
    "bias": lambda: _products.tile_bias(half(*TOKENS[1]), ONES),
    "kept sums": lambda: _products.over_records(torch.zeros(64, 1, 192), ONES),
    "channels": lambda: _products.channel_scale(half(64, 64, 20), half(64, 64, 20), LIMITS, 7, 1.0),
    "channels, norms": lambda: _products.channel_scale(
        plain(64, 64, 20), plain(64, 64, 20), None, 0, 1.0, 1e-9, torch.zeros(64, 2, 64, dtype=torch.float64)
    ),
    "projection": lambda: _one_launch.project(plain(64, 1000), 1.0),
    "cross-entropy": lambda: _one_launch.cross_entropy(plain(64, 10), ONES.long(), -100, 1.0, 1.0, 1.0),
    "noise": lambda: _one_launch.scale_blocks_(plain(4000), torch.ones(3, dtype=torch.float64), ENDS),
}  # fmt: skip


def kernels() -> set[str]:
    """All that is launched."""
    folder = Path(_tiles.__file__).parent
    text = "".join((folder / f"{name}.py").read_text() for name in FILES)
    return {name for name in re.findall(r"@triton\.jit\ndef (\w+)\(", text) if not name.startswith("_")}


def test_every_kernel_compiles_and_fits(compiled: list[Compiled], capability: int) -> None:
    """Products use tensor cores: those of Hopper where tiles are large enough, those of float64 for float64 sums."""
    launched: set[str] = set()
    for name, work in (ON_TENSOR_CORES | OTHERS).items():
        compiled.clear()
        work()
        assert compiled
        launched |= {one.kernel for one in compiled}
        for one in compiled:
            assert one.shared <= SHARED[capability], (name, one)
            assert one.stack <= (STACK[capability] if one.kernel == "tiles" else 16), (name, one)
        used = frozenset[str]().union(*(one.operators for one in compiled))
        if name in ON_TENSOR_CORES:
            single = "HGMMA" if capability == 90 and name != "TF32, first layer" else "HMMA"
            assert used == {"DMMA" if name.startswith("float64") else single}, name
        else:
            assert not used, name
    assert launched == kernels()
    assert {path.stem for path in Path(_tiles.__file__).parent.glob("*_triton.py")} == set(FILES)
