"""Fixed feature maps: images in, unit-norm records on an integer grid out. Nothing is learned from private data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.nn import Scattering2d, safe_normalise
from weightclip_studies.images._product import Features, collect, encode
from weightclip_studies.images._synthetic import dead_leaves

_OPPONENT = ((1 / 3, 1 / 3, 1 / 3), (0.5, -0.5, 0.0), (0.25, 0.25, -0.5))  # grey, red-green, yellow-blue


@dataclass(frozen=True)
class FeatureSettings:
    """A fixed feature map. Every field is public, and so are the synthetic pictures it takes statistics from.

    Attributes:
        scattering: Weight of the scattering block (J = 2); 0 leaves it out.
        groups: Groups of the per-record normalisation of scattering channels.
        opponent: Turn RGB into grey and two opponent planes before scattering.
        patches: Number of patch filters, 0 for none.
        patch_weight: Weight of the patch block.
        patch_size: Height and width of a patch.
        threshold: Soft threshold of the cosine between a patch and a filter.
        pool: Positions per axis of the pooled patch responses.
        whiten: Ridge (relative to the mean eigenvalue) of the whitening of channels by synthetic pictures; None: no
            whitening, scattering is centred per record only.
        flip: Average the features of an image and of its mirror image.
        root: Signed square root of pooled patch responses.
        grey: Number of filters of a second block of patches, of the grey image; 0 for none.
        grey_size: Height and width of its patches.
        power: Exponent of the sizes of whitened patch features, signs kept; below 1 it tames the largest.
        smooth: Passes of smoothing over neighbouring cells, of the scattering, patch and grey blocks. A pass adds to
            each cell the mean of its 3 x 3 neighbourhood: weights that agree in neighbouring cells become cheaper.
        seed: Seed of the synthetic pictures.
    """

    scattering: float = 1.0
    groups: int = 27
    opponent: bool = False
    patches: int = 0
    patch_weight: float = 1.0
    patch_size: int = 6
    threshold: float = 0.15
    pool: int = 4
    whiten: float | None = None
    flip: bool = False
    root: bool = False
    grey: int = 0
    grey_size: int = 7
    power: float = 1.0
    smooth: tuple[int, int, int] = (0, 0, 0)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "smooth", tuple(int(n) for n in self.smooth))  # a list where it comes from a file

    @property
    def name(self) -> str:
        """Blocks, for the name of a model."""
        blocks = {"scattering": self.scattering, "patches": self.patches, "grey": self.grey}
        return "+".join(block for block, there in blocks.items() if there)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)


class Whitening(nn.Module):
    """x -> (C + ridge I)^(-1/2) (x - mean) over channels, mean and C from synthetic pictures."""

    mean: Tensor
    matrix: Tensor

    def __init__(self, x: Tensor, ridge: float) -> None:
        super().__init__()
        rows = x.movedim(1, -1).flatten(0, -2).double()  # (records, positions) x channels
        mean = rows.mean(0)
        covariance = (rows - mean).t() @ (rows - mean) / len(rows)
        values, vectors = torch.linalg.eigh(covariance)
        floor = ridge * values.mean()
        self.register_buffer("mean", mean.float())
        self.register_buffer("matrix", ((vectors * (values.clamp_min(0) + floor).rsqrt()) @ vectors.t()).float())

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1,) * (x.dim() - 2))
        return torch.einsum("oc,nc...->no...", self.matrix, x - self.mean.view(shape))


class PatchFeatures(nn.Module):
    """Cosines between whitened patches and K filters, soft-thresholded on both sides and averaged over a grid of cells.

    Filters and whitening come from synthetic pictures. Records are never mixed.
    """

    matrix: Tensor
    filters: Tensor

    def __init__(self, settings: FeatureSettings, planes: int, device: torch.device | str) -> None:
        super().__init__()
        self.size, self.threshold, self.pool, self.root = (
            settings.patch_size, settings.threshold, settings.pool, settings.root
        )  # fmt: skip
        images = dead_leaves(2048, 32, planes, seed=settings.seed, device=device)
        patches = nn.functional.unfold(images, self.size, stride=3).movedim(1, -1).flatten(0, 1)
        generator = torch.Generator().manual_seed(settings.seed + 1)
        rows = torch.randperm(len(patches), generator=generator)[:100_000].to(device)
        patches = patches[rows].double()
        centred = patches - patches.mean(1, keepdim=True)
        values, vectors = torch.linalg.eigh(centred.t() @ centred / len(centred))
        floor = 1e-3  # variance of pixels in [0, 1] is about 0.05
        matrix = (vectors * (values.clamp_min(0) + floor).rsqrt()) @ vectors.t()
        white = centred @ matrix
        norm = white.norm(dim=1)
        keep = (norm > norm.median()).nonzero().squeeze(1)[: settings.patches]  # flat patches make poor filters
        self.register_buffer("filters", (white[keep] / norm[keep, None]).float())
        self.register_buffer("matrix", matrix.float())

    def forward(self, x: Tensor) -> Tensor:
        columns = nn.functional.unfold(x, self.size)  # records x patch x positions
        columns = columns - columns.mean(1, keepdim=True)
        white = torch.einsum("op,npl->nol", self.matrix, columns)
        white = white / (white.square().sum(1, keepdim=True) + 1.0).sqrt()  # flat patches stay small
        cosine = torch.einsum("kp,npl->nkl", self.filters, white)
        side = math.isqrt(cosine.shape[-1])
        both = torch.cat([(cosine - self.threshold).relu(), (-cosine - self.threshold).relu()], 1)
        pooled = nn.functional.adaptive_avg_pool2d(both.unflatten(2, (side, side)), self.pool)
        return pooled.sqrt() if self.root else pooled


class FeatureMap(nn.Module):
    """Images (uint8) to unit-norm records.

    Formal guarantees: every output has l2 norm at most 1 and depends on its own image alone; the map itself is made
    from ``settings`` and synthetic pictures, so it is public.
    """

    def __init__(self, settings: FeatureSettings, shape: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.settings = settings
        self.planes, self.size = (1 if len(shape) == 2 else shape[-1]), shape[0]
        self.scattering = Scattering2d(J=2, shape=(self.size, self.size)).to(device) if settings.scattering else None
        self.patch = PatchFeatures(settings, self.planes, device) if settings.patches else None
        small = replace(settings, patches=settings.grey, patch_size=settings.grey_size)
        self.grey = PatchFeatures(small, 1, device) if settings.grey else None
        self.register_buffer("colours", torch.tensor(_OPPONENT).to(device))
        self.white_scattering: nn.Module = nn.Identity()
        self.white_patch: nn.Module = nn.Identity()
        self.white_grey: nn.Module = nn.Identity()
        if settings.whiten is not None:
            images = dead_leaves(1024, self.size, self.planes, seed=settings.seed + 2, device=device)
            parts = [self._raw(part) for part in images.split(128)]
            for name in parts[0]:
                setattr(self, f"white_{name}", Whitening(torch.cat([p[name] for p in parts]), settings.whiten))

    def _raw(self, x: Tensor) -> dict[str, Tensor]:
        """Maps of each block, before whitening."""
        out = {}
        if self.scattering is not None:
            planes = torch.einsum("oc,nchw->nohw", self.get_buffer("colours"), x) if self.opponent else x
            maps = self.scattering(planes).flatten(1, 2)  # records x channels x positions
            groups = maps.unflatten(1, (self.settings.groups, -1)).flatten(2)
            out["scattering"] = safe_normalise(groups, 1e-3, (2,)).reshape(maps.shape)
        if self.patch is not None:
            out["patch"] = self.patch(x)
        if self.grey is not None:
            out["grey"] = self.grey(x.mean(1, keepdim=True))
        return out

    @property
    def opponent(self) -> bool:
        """Whether colours are turned into opponent planes."""
        return self.settings.opponent and self.planes == 3

    def _views(self, x: Tensor) -> dict[str, Tensor]:
        """Whitened maps of each block, each a unit vector."""
        return {name: _unit(getattr(self, f"white_{name}")(part)) for name, part in self._raw(x).items()}

    def _finish(self, name: str, maps: Tensor) -> Tensor:
        """Power and smoothing of one block's maps, its norm kept; flat, with its weight."""
        s = self.settings
        size, tamed = maps.flatten(1).norm(dim=1, keepdim=True), maps
        if s.power != 1 and name != "scattering":
            tamed = tamed.sign() * tamed.abs() ** s.power
        for _ in range(s.smooth[("scattering", "patch", "grey").index(name)]):
            tamed = tamed + nn.functional.avg_pool2d(tamed, 3, 1, 1)
        flat = tamed.flatten(1) if tamed is maps else _unit(tamed.flatten(1)) * size
        return (s.scattering if name == "scattering" else s.patch_weight) * flat

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        x = images.float() / 255
        x = x.unsqueeze(1) if x.dim() == 3 else x.movedim(-1, 1)
        blocks = self._views(x)
        if self.settings.flip:
            blocks = {name: maps + other for (name, maps), other in
                      zip(blocks.items(), self._views(x.flip(-1)).values(), strict=True)}  # fmt: skip
        return _unit(torch.cat([self._finish(name, maps) for name, maps in blocks.items()], 1))

    def encode(self, images: Tensor, labels: Tensor, chunk: int = 1000) -> Features:
        """Features of all images on the integer grid."""
        return collect(torch.cat([encode(self(part)) for part in images.split(chunk)]), labels)


def _unit(x: Tensor) -> Tensor:
    """Each record divided by its norm."""
    size = x.flatten(1).square().sum(1).clamp_min(1e-12).rsqrt()
    return x * size.view(-1, *(1,) * (x.dim() - 1))
