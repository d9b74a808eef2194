"""Steps of DP-SGD by Opacus, with a fixed or an adaptive threshold, and of training without privacy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip_studies.figure._recipe import Recipe

Step = Callable[[Tensor, Tensor], None]
_MOST = 2**33  # numbers that the gradients of one piece's records may have together: 32 GiB


def ghost_is_faster(recipe: Recipe) -> bool:
    """Whether Opacus finds norms without gradients of single records (ghost clipping), which is the same mechanism.

    On one H200, ConvNet, 1,024 records: 10.6 ms a step against 19.0 with these gradients; WRN-16-4: 239 against 161
    (`results/bench/step.csv`). Opacus knows ghost norms of neither standardised convolutions nor adaptive thresholds.
    """
    return recipe.network == "convnet" and recipe.method == "opacus" and not recipe.standardise


def plain_step(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, cast: Callable[[], Any], piece: int
) -> Step:
    """A step without privacy, in pieces of at most so many rows."""

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        y = y.repeat_interleave(len(x) // len(y))
        for a, b in zip(x.split(piece), y.split(piece), strict=True):
            with cast():
                value = nn.functional.cross_entropy(model(a), b)
            (value * (len(a) / len(x))).backward()
        optimizer.step()

    return step


def opacus_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, batch: int, sigma: float, rows: int = _MOST
) -> tuple[Step, Any]:
    """(a step of DP-SGD, Opacus's optimiser) in pieces that fit into memory, by whichever of its two ways is faster.

    Formal guarantees:
        Opacus's own: one Gaussian mechanism of multiplier ``sigma`` a step on a Poisson draw, by a generator that the
        operating system seeds. With an adaptive threshold the noise of gradients is larger, so that both releases
        together cost that: a record moves the count of unclipped ones by 1, so that their multipliers s and z must have
        1/s^2 + 1/z^2 = 1/sigma^2. Opacus 1.6 takes 1/(4 s^2), as for counts around a half (Andrew et al. 2021,
        Theorem 1), which it does not release. The share of records is taken of the public batch size, where Opacus
        divides by the size of the draw, which is private.
    """
    try:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
        from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    except ImportError as error:
        raise WeightclipError("Opacus is not installed: pip install opacus, or leave it out with --methods.") from error

    class PublicShare(AdaClipDPOptimizer):
        def zero_grad(self, set_to_none: bool = False) -> None:
            counted = self.unclipped_num if self._is_last_step_skipped else 0  # of the draw's earlier pieces
            super().zero_grad(set_to_none)
            self.unclipped_num = counted

        def update_max_grad_norm(self) -> None:
            self.sample_size = batch
            super().update_max_grad_norm()

    ghost, generator = ghost_is_faster(recipe), torch.Generator(next(model.parameters()).device)
    generator.seed()
    noise: dict[str, Any] = {"noise_multiplier": sigma, "max_grad_norm": recipe.clip, "expected_batch_size": batch,
                             "generator": generator}  # fmt: skip
    loss: Any = nn.CrossEntropyLoss()
    if ghost:
        wrapped: Any = GradSampleModuleFastGradientClipping(model, max_grad_norm=recipe.clip)  # type: ignore[arg-type]
        private: Any = DPOptimizerFastGradientClipping(optimizer, **noise)
        loss = DPLossFastGradientClipping(wrapped, private, loss)
    elif recipe.method == "opacus-adaptive":
        wrapped, s = GradSampleModule(model), max(batch / 20, 2 * sigma)
        noise["noise_multiplier"] = (sigma**-2 - 0.75 * s**-2) ** -0.5 if sigma else 0.0  # Opacus takes 1/(4 s^2) off
        private = PublicShare(
            optimizer, **noise, target_unclipped_quantile=recipe.quantile, clipbound_learning_rate=0.2,
            max_clipbound=1e4, min_clipbound=1e-4, unclipped_num_std=s,
        )  # fmt: skip
    else:
        wrapped, private = GradSampleModule(model), DPOptimizer(optimizer, **noise)
    piece = rows if ghost else max(1, min(rows, _MOST // sum(p.numel() for p in model.parameters())))

    def step(x: Tensor, y: Tensor) -> None:
        parts = list(zip(x.split(piece), y.split(piece), strict=True))
        if not len(x):
            raise WeightclipError("an empty draw, which Opacus cannot release: take a larger batch.")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            for i, (a, b) in enumerate(parts):
                private.signal_skip_step(i + 1 < len(parts))
                private.zero_grad()
                loss(wrapped(a), b).backward()
                private.step()

    private.grad_sample_module = wrapped  # whose hooks come off at the end
    return step, private
