"""Weight gradients of dense layers over positions, kernel by kernel, beside cuBLAS: one GPU, microseconds.

``--sweep`` tries other shapes of tiles and numbers of parts. Compiling takes most of the time of a first run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weightclip.factors.kernels import _products, _tiles

SHAPES = ((768, 768), (768, 3072), (3072, 768))
SWEEP = (
    (128, 64, 2, 128, 8, 3), (128, 64, 1, 64, 4, 3), (64, 128, 1, 128, 4, 2), (64, 64, 2, 128, 4, 2),
    (128, 128, 1, 64, 8, 4), (64, 64, 1, 128, 4, 2),
)  # fmt: skip
GROUPED = "records added in float32 groups"
PARTS = (1, 2, 3, 4, 5, 7, 11)


def time(work: Callable[[], Any]) -> float:
    """Median over a tenth of a second."""
    from triton.testing import do_bench

    found: Any = do_bench(work, warmup=10, rep=100, return_mode="median")
    return 1e3 * found


def best(work: Callable[[], Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """Every shape of tiles with its best number of parts."""
    tiling, parts = _tiles.tiling, _tiles._parts
    try:
        for how in shapes:
            _tiles.tiling = lambda *a, how=how: _tiles.Tiling(*how)
            found = []
            for count in PARTS:
                _tiles._parts = lambda *a, count=count: count
                found.append((time(work), count))
            print(f"    tiles {how}: {min(found)[0]:.1f} with {min(found)[1]} parts")
    finally:
        _tiles.tiling, _tiles._parts = tiling, parts


def kernels(records: int, positions: int, inputs: int, outs: int) -> dict[str, Callable[[], Any]]:
    """What is timed for one layer."""
    device, limits = torch.device("cuda"), torch.tensor([1.0, 0.1, 1.0], device="cuda")
    x, d = (torch.randn(records, positions, n, device=device).bfloat16() for n in (inputs, outs))
    scale, group = torch.rand(records, device=device), _tiles.tile_group(2 * records)
    return {
        "cuBLAS, no scales, one float32 sum": lambda: d.flatten(0, 1).t() @ x.flatten(0, 1),
        "records added in float64": lambda: _tiles.tile_sums(x, d, scale),
        GROUPED: lambda: _tiles.tile_sums(x, d, scale, group=group),
        "exact norms": lambda: _tiles.tile_norms(x, d, 1.0),
        "scales from both norms": lambda: _products.fused_scale(x, d, limits, 3, 1.0),
        "bias": lambda: _products.tile_bias(d, scale),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    for inputs, outs in SHAPES:
        works = kernels(options.records, options.positions, inputs, outs)
        print(f"{options.records} records of {options.positions} positions, {inputs} to {outs}")
        for name, work in works.items():
            print(f"  {name:36} {time(work):8.1f}")
        if options.sweep:
            best(works[GROUPED], SWEEP)


if __name__ == "__main__":
    main()
