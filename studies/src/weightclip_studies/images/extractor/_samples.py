"""A picture of what an extractor learns from."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from weightclip.errors import WeightclipError


def contact_sheet(images: Tensor, path: Path, columns: int = 16) -> Path:
    """Write pictures (uint8, count x 3 x size x size) side by side as PNG; the count is cut to whole rows."""
    try:
        from PIL import Image
    except ImportError as error:
        raise WeightclipError("writing pictures needs Pillow: pip install -e studies") from error
    rows = len(images) // columns
    if not rows:
        raise WeightclipError(f"a sheet of {columns} columns needs as many pictures, got {len(images)}")
    sheet = images[: rows * columns].cpu().unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2)  # rows y columns x rgb
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet.flatten(0, 1).flatten(1, 2).contiguous().numpy()).save(path, optimize=True)
    return path
