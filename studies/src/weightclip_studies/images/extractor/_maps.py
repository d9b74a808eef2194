"""Features of learned networks: maps of all stages, whitened by synthetic pictures, as one unit vector a record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip_studies.images._synthetic import strokes
from weightclip_studies.images._whitening import Whitening, tamed, unit
from weightclip_studies.images.extractor._network import ResNet9
from weightclip_studies.images.extractor._processes import Processes, pictures
from weightclip_studies.images.extractor._weights import find_extractor

_CHUNK = 128


@dataclass(frozen=True)
class LearnedSettings:
    """Features of one or several extractors. Every field is public.

    Attributes:
        names: The extractors' names.
        digests: SHA-256 of their weights: the features are those of exactly these weights.
        share: Square of the block's weight where it is joined to other features (weight^2).
        pool: Cells per axis of the pooled maps.
        ridge: Ridge of the whitening, relative to the mean eigenvalue.
        power: Exponent of the sizes of whitened maps, signs kept.
        smooth: Passes of smoothing over neighbouring cells.
        flip: Average the maps of an image and of its mirror image.
        pictures: Synthetic pictures that the whitening takes its statistics from.
        seed: Seed of these pictures.
        lines: Take bright lines on black for these pictures; for images of one plane.
    """

    names: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    share: float = 0.7
    pool: int = 4
    ridge: float = 0.1
    power: float = 0.7
    smooth: int = 1
    flip: bool = True
    pictures: int = 4096
    seed: int = 1
    lines: bool = False

    def __post_init__(self) -> None:
        for name in ("names", "digests"):  # lists where they come from a file
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.names or len(self.names) != len(self.digests):
            raise WeightclipError("LearnedSettings: give at least one extractor, and one SHA-256 for each name")
        if not 0 < self.share <= 1:
            raise WeightclipError(f"LearnedSettings.share: above 0 and at most 1, got {self.share}")


class LearnedFeatures(nn.Module):
    """Images in [0, 1] (records x planes x size x size) to unit vectors.

    Formal guarantees: every output has l2 norm at most 1 (a constant map may give 0) and depends on its own image, the
    extractors and the settings alone. Extractors hold no layer that mixes records, and the whitening is made here, from
    synthetic pictures, before any image is seen: no method of this class updates it.
    """

    def __init__(self, settings: LearnedSettings, shape: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.settings = settings
        self.size, self.planes = shape[0], (1 if len(shape) == 2 else shape[-1])
        self.nets = nn.ModuleList(
            find_extractor(name, digest) for name, digest in zip(settings.names, settings.digests, strict=True)
        ).to(device)
        made = pictures(settings.pictures, Processes(size=self.size), settings.seed, device).float() / 255
        made = made if self.planes == 3 else made.mean(1, keepdim=True)
        if settings.lines:
            made = strokes(settings.pictures, self.size, settings.seed, device)
        parts = [self._maps(part) for part in made.split(_CHUNK)]
        self.white = nn.ModuleList(
            Whitening(torch.cat(maps), settings.ridge) for maps in zip(*parts, strict=True)
        )  # fmt: skip
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def _maps(self, x: Tensor) -> list[Tensor]:
        """Pooled maps of all stages of all nets, averaged with those of the mirror image."""
        edge = max(0, 32 - self.size)
        x = nn.functional.pad(x, (edge // 2, edge - edge // 2) * 2).expand(-1, 3, -1, -1)
        views = [x, x.flip(-1)] if self.settings.flip else [x]
        with _exact():
            found = [[self._pooled(net, v) for v in views] for net in self.nets]
        return [torch.stack(stage).mean(0) for net in found for stage in zip(*net, strict=True)]

    def _pooled(self, net: nn.Module, x: Tensor) -> list[Tensor]:
        assert isinstance(net, ResNet9)
        return [nn.functional.adaptive_avg_pool2d(maps, self.settings.pool) for maps in net(x)]

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        s = self.settings
        blocks = [
            unit(tamed(white(maps), s.power, s.smooth).flatten(1))
            for white, maps in zip(self.white, self._maps(x), strict=True)
        ]
        return unit(torch.cat(blocks, 1))


@contextlib.contextmanager
def _exact() -> Iterator[None]:
    """Convolutions in single precision by one fixed algorithm: the choice may not depend on a timing."""
    if not torch.cuda.is_available():
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
