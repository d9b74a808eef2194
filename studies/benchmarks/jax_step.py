# pyright: reportMissingImports=false
"""Step time of jax_privacy against plain JAX on networks of `weightclip-study bench`, interleaved in one process.

It needs an environment of its own with nothing of weightclip in it (`pip install jax-privacy`):

    python studies/benchmarks/jax_step.py --models mlp convnet --batches 64 256

Ratios are to plain JAX, as those of results/bench/step.csv are to plain torch: the two tables compare what privacy
costs in each library, not the libraries. One CPU thread by default; a step is compiled as a whole (forward, backward,
noise and Adam), with batches of one size, which is what jax_privacy trains on (padded Poisson draws).
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS = ("device", "model", "batch", "mode", "ms", "ratio", "spread", "precision", "compile")


def dense(rng: Any, sizes: list[int]) -> list[Any]:
    """Weights and biases of a chain of dense layers."""
    return [
        (rng.standard_normal((a, b), dtype="float32") / a**0.5, rng.standard_normal(b, dtype="float32") * 0)
        for a, b in zip(sizes, sizes[1:], strict=False)
    ]


def networks() -> dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any], tuple[int, ...], int]]:
    """First parameters, forward pass, shape of a record and number of classes, by the names of the other benchmark."""
    import jax
    from jax import lax

    def chain(layers: Any, x: Any) -> Any:
        for weight, bias in layers[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        return x @ layers[-1][0] + layers[-1][1]

    def mlp(sizes: list[int]) -> Any:
        return lambda rng: dense(rng, sizes), chain, (sizes[0],), sizes[-1]

    def convnet(rng: Any) -> Any:
        first, second = (
            rng.standard_normal((3, 3, a, b), dtype="float32") / (9 * a) ** 0.5 for a, b in ((1, 32), (32, 64))
        )
        biases = [rng.standard_normal(n, dtype="float32") * 0 for n in (32, 64)]
        return [(first, biases[0]), (second, biases[1])], dense(rng, [64 * 14 * 14, 128, 10])

    def convolve(parameters: Any, x: Any) -> Any:
        kernels, layers = parameters
        for kernel, bias in kernels:
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + bias)
        x = lax.reduce_window(x, -float("inf"), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return chain(layers, x.reshape(len(x), -1))

    return {
        "mlp": mlp([105, 16, 2]),
        "mlp-4096": mlp([1024, 4096, 4096, 10]),
        "convnet": (convnet, convolve, (28, 28, 1), 10),
    }


def steps(name: str, batch: int, microbatch: int | None) -> dict[str, Callable[[], Any]]:
    """A function that takes one step, and waits for it, for each mode."""
    import jax
    import jax_privacy
    import numpy
    import optax

    begin, forward, shape, classes = networks()[name]
    rng = numpy.random.default_rng(0)
    x = jax.numpy.asarray(rng.standard_normal((batch, *shape), dtype="float32"))
    y = jax.numpy.asarray(rng.integers(0, classes, batch))
    adam = optax.adam(1e-4)

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(forward(parameters, x), y).mean()

    clipped = jax_privacy.clipped_grad(
        loss, l2_clip_norm=1.0, batch_argnums=(1, 2), normalize_by=batch, microbatch_size=microbatch
    )
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(stddev=1.0 / batch, prng_key=jax.random.key(0))

    def plain(state: Any) -> Any:
        parameters, moments, _ = state
        updates, moments = adam.update(jax.grad(loss)(parameters, x, y), moments, parameters)
        return optax.apply_updates(parameters, updates), moments, ()

    def private(state: Any) -> Any:
        parameters, moments, noise = state
        gradient, noise = privatizer.update(clipped(parameters, x, y), noise)
        updates, moments = adam.update(gradient, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, noise

    def stepper(step: Any, noisy: bool) -> Callable[[], Any]:
        parameters = jax.tree.map(jax.numpy.asarray, begin(numpy.random.default_rng(1)))
        held = [(parameters, adam.init(parameters), privatizer.init(parameters) if noisy else ())]
        compiled = jax.jit(step)

        def take() -> None:
            held[0] = jax.block_until_ready(compiled(held[0]))

        return take

    return {"jax-plain": stepper(plain, False), "jax-privacy": stepper(private, True)}


def measure(name: str, batch: int, seconds: float, microbatch: int | None, threads: int) -> list[dict[str, Any]]:
    """Median step time of both modes in turn."""
    import jax

    made = steps(name, batch, microbatch)
    for step in made.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {mode: [] for mode in made}
    until = time.perf_counter() + seconds * len(made)
    while time.perf_counter() < until or len(times["jax-plain"]) < 3:
        for mode, step in made.items():
            began = time.perf_counter()
            step()
            times[mode].append(time.perf_counter() - began)
    device = jax.devices()[0]
    label = f"cpu x{threads}" if device.platform == "cpu" else device.device_kind
    medians = {mode: statistics.median(values) for mode, values in times.items()}
    rows = []
    for mode, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        rows.append({
            "device": label, "model": name, "batch": batch, "mode": mode, "ms": round(1e3 * medians[mode], 4),
            "ratio": round(medians[mode] / medians["jax-plain"], 4), "spread": round((high - low) / medians[mode], 4),
            "precision": "float32", "compile": 1,
        })  # fmt: skip
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "convnet"], choices=["mlp", "mlp-4096", "convnet"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--seconds", type=float, default=5.0, help="per mode")
    parser.add_argument("--microbatch", type=int, help="records whose gradients are held at once; all by default")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=Path("results/bench/jax.csv"))
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # XLA has no other way to be told
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    try:
        import jax_privacy  # noqa: F401
    except ImportError:
        sys.exit("jax_privacy is not installed: pip install jax-privacy, in an environment of its own.")
    rows = []
    for name in options.models:
        for batch in options.batches:
            for row in measure(name, batch, options.seconds, options.microbatch, options.threads):
                rows.append(row)
                print(f"{name:9} {batch:6} {row['mode']:12} {row['ms']:9.3f} ms  x{row['ratio']:5.2f}", file=sys.stderr)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
