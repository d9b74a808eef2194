"""DP-SGD by Opacus: gradients of single records where they are small, ghost clipping where they would be large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from weightclip_studies.text._settings import Settings

_MOST = 2**31
"""Numbers that the gradients of a draw's records may have together: eight gigabytes."""


def is_ghost(model: nn.Module, batch: int) -> bool:
    """Whether norms are found without the gradients, by a second backward pass.

    Gradients of single records need one pass only and are faster while they fit, as those of low-rank updates do.
    """
    return batch * sum(p.numel() for p in model.parameters() if p.requires_grad) > _MOST


def steps_of_opacus(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]], settings: Settings,
    sigma: float, seed: int | None, piece: int | None,
) -> Iterator[int]:  # fmt: skip
    """Train, telling after each step how many were made."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    ghost, generator = is_ghost(model, settings.batch), None
    if seed is not None:
        generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    noise = {"noise_multiplier": sigma, "max_grad_norm": settings.clip, "expected_batch_size": settings.batch,
             "generator": generator}  # fmt: skip
    loss: nn.Module | DPLossFastGradientClipping = nn.CrossEntropyLoss()
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=settings.clip)  # type: ignore[arg-type]
        private = DPOptimizerFastGradientClipping(optimizer, **noise)
        loss = DPLossFastGradientClipping(wrapped, private, loss)
    else:
        wrapped, private = GradSampleModule(model), DPOptimizer(optimizer, **noise)
    try:
        for done, (x, y) in enumerate(batches, 1):
            size = piece or len(x)
            parts = list(zip(x.split(size), y.split(size), strict=True))
            for i, (a, b) in enumerate(parts):
                private.signal_skip_step(i + 1 < len(parts))
                private.zero_grad()
                loss(wrapped(a), b).backward()
                for p in () if ghost else private.params:  # half precision under autocast: norms and sums need more
                    p.grad_sample = p.grad_sample.float()  # type: ignore[attr-defined]
                with torch.autocast(x.device.type, enabled=False):
                    private.step()
            yield done
    finally:
        wrapped.to_standard_module()
