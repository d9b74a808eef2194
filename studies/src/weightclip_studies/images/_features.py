"""Fixed feature maps: images in, unit-norm records on an integer grid out. Nothing is learned from private data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.nn import Scattering2d
from weightclip_studies.images._product import Features, collect, encode
from weightclip_studies.images._synthetic import dead_leaves, strokes
from weightclip_studies.images._whitening import Whitening, normalised, row_sums, tamed, unit
from weightclip_studies.images.extractor import LearnedFeatures, LearnedSettings

CHUNK = 1000
"""Records of one pass of a feature map."""
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
        lines: Whiten by pictures of bright lines on black instead of dead leaves; for one plane only.
        flip: Average the features of an image and of its mirror image.
        root: Signed square root of pooled patch responses.
        grey: Number of filters of a second block of patches, of the grey image; 0 for none.
        grey_size: Height and width of its patches.
        power: Exponent of the sizes of whitened patch features, signs kept; below 1 it tames the largest.
        smooth: Passes of smoothing over neighbouring cells, of the scattering, patch and grey blocks. A pass adds to
            each cell the mean of its 3 x 3 neighbourhood: weights that agree in neighbouring cells become cheaper.
        seed: Seed of the synthetic pictures.
        learned: Features of networks trained on synthetic pictures, joined to the other blocks; None for none.
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
    lines: bool = False
    flip: bool = False
    root: bool = False
    grey: int = 0
    grey_size: int = 7
    power: float = 1.0
    smooth: tuple[int, int, int] = (0, 0, 0)
    seed: int = 0
    learned: LearnedSettings | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "smooth", tuple(int(n) for n in self.smooth))  # a list where it comes from a file
        if isinstance(self.learned, dict):  # likewise
            object.__setattr__(self, "learned", LearnedSettings(**self.learned))

    @property
    def name(self) -> str:
        """Blocks, for the name of a model."""
        blocks = {
            "scattering": self.scattering, "patches": self.patches, "grey": self.grey, "learned": self.learned
        }  # fmt: skip
        return "+".join(block for block, there in blocks.items() if there)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values; what there is no learned block and are no lines for is told as before there were."""
        return {key: value for key, value in asdict(self).items() if key not in ("learned", "lines") or value}


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
        if not x.is_cuda and len(x) > 1:  # what one record needs fits into a CPU's cache
            return torch.cat([self(record) for record in x.split(1)])
        columns = nn.functional.unfold(x, self.size)  # records x patch x positions
        columns = columns - columns.mean(1, keepdim=True)
        white = torch.einsum("op,npl->nol", self.matrix, columns)
        white = white / (white.square().sum(1, keepdim=True) + 1.0).sqrt()  # flat patches stay small
        cosine = torch.einsum("kp,npl->nkl", self.filters, white)
        side = math.isqrt(cosine.shape[-1])
        shrunk = nn.functional.softshrink(cosine, self.threshold).unflatten(2, (side, side))
        signed, sizes = (nn.functional.adaptive_avg_pool2d(part, self.pool) for part in (shrunk, shrunk.abs()))
        pooled = torch.cat([sizes + signed, sizes - signed], 1) / 2  # the means of both signs' excess
        return pooled.clamp_min(0).sqrt() if self.root else pooled


class FeatureMap(nn.Module):
    """Images (uint8) to unit-norm records.

    Formal guarantees: every output has l2 norm at most 1 and depends on its own image alone; the map itself is made
    from ``settings``, synthetic pictures and networks trained on such pictures, so it is public. `encode` gives every
    pass the same number of rows; `chunk_alone` tries on synthetic pictures whether codes are then the same bit by bit
    whatever a record's place and neighbours, which rounding on a GPU could break.
    """

    def __init__(self, settings: FeatureSettings, shape: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.settings = settings
        self.planes, self.size = (1 if len(shape) == 2 else shape[-1]), shape[0]
        if self.planes != 1 and (settings.lines or (settings.learned and settings.learned.lines)):
            raise WeightclipError("FeatureSettings.lines: for images of one plane only")
        self.scattering = Scattering2d(J=2, shape=(self.size, self.size)).to(device) if settings.scattering else None
        self.patch = PatchFeatures(settings, self.planes, device) if settings.patches else None
        small = replace(settings, patches=settings.grey, patch_size=settings.grey_size)
        self.grey = PatchFeatures(small, 1, device) if settings.grey else None
        self.register_buffer("colours", torch.tensor(_OPPONENT).to(device))
        self.white_scattering: nn.Module = nn.Identity()
        self.white_patch: nn.Module = nn.Identity()
        self.white_grey: nn.Module = nn.Identity()
        self.learned = LearnedFeatures(settings.learned, shape, device) if settings.learned else None
        if settings.whiten is not None:
            images = dead_leaves(1024, self.size, self.planes, seed=settings.seed + 2, device=device)
            if settings.lines:
                images = strokes(1024, self.size, settings.seed + 2, device)
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
            out["scattering"] = normalised(groups, 1e-3).reshape(maps.shape)
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
        return {name: unit(getattr(self, f"white_{name}")(part)) for name, part in self._raw(x).items()}

    def _finish(self, name: str, maps: Tensor) -> Tensor:
        """Power and smoothing of one block's maps, its norm kept; flat, with its weight."""
        s = self.settings
        power = 1.0 if name == "scattering" else s.power
        passes = s.smooth[("scattering", "patch", "grey").index(name)]
        flat = maps.flatten(1)
        if power != 1 or passes:
            flat = unit(tamed(maps, power, passes).flatten(1)) * row_sums(flat.square()).sqrt().unsqueeze(1)
        return (s.scattering if name == "scattering" else s.patch_weight) * flat

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        x = images.float() / 255
        x = x.unsqueeze(1) if x.dim() == 3 else x.movedim(-1, 1)
        blocks = self._views(x)
        if self.settings.flip:
            blocks = {name: maps + other for (name, maps), other in
                      zip(blocks.items(), self._views(x.flip(-1)).values(), strict=True)}  # fmt: skip
        parts = [self._finish(name, maps) for name, maps in blocks.items()]
        fixed = unit(torch.cat(parts, 1)) if parts else None
        if self.learned is None:
            if fixed is None:
                raise WeightclipError("FeatureSettings: give scattering, patches, grey or learned a weight above 0")
            return fixed
        learned = self.learned(x)
        if fixed is None:
            return learned
        share = self.learned.settings.share
        return torch.cat([math.sqrt(1 - share) * fixed, math.sqrt(share) * learned], 1)

    def codes(self, images: Tensor, chunk: int = CHUNK) -> Tensor:
        """Features of all images as codes of the integer grid, in passes of ``chunk`` rows; the last is padded."""
        found = []
        for part in images.split(chunk):
            rows = torch.cat([part, part.new_zeros(chunk - len(part), *part.shape[1:])])
            found.append(encode(self(rows))[: len(part)])
        return torch.cat(found)

    def encode(self, images: Tensor, labels: Tensor, chunk: int = CHUNK) -> Features:
        """Features of all images on the integer grid."""
        return collect(self.codes(images, chunk), labels)

    def chunk_alone(self, device: torch.device | str, chunk: int = CHUNK) -> int:
        """Rows of a pass in which a record's codes do not depend on its place or on others: ``chunk``, or fewer.

        Synthetic pictures are encoded, once as they are and once with the first one taken out, which moves each later
        one by a row and the first of a pass into the pass before. Nothing private is looked at. A pass of one row
        needs no trial.
        """
        made = dead_leaves(chunk + 24, self.size, self.planes, seed=self.settings.seed + 3, device=device)
        images = (made * 255).round().to(torch.uint8)
        images = images.squeeze(1) if self.planes == 1 else images.movedim(1, -1).contiguous()
        for rows in (chunk, chunk // 8, chunk // 64):
            if rows > 1 and torch.equal(self.codes(images, rows)[1:], self.codes(images[1:], rows)):
                return rows
        return 1
