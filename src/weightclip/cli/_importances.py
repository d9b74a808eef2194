"""``weightclip importances``: what a model looks at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from weightclip.errors import WeightclipError


def importances(
    model: Annotated[Path, typer.Argument(help="model folder")],
    public_data: Annotated[Path | None, typer.Option(help="PUBLIC table with labels: permutation importances")] = None,
    target: Annotated[str | None, typer.Option(help="its label column (default: the model's target)")] = None,
    delimiter: Annotated[str | None, typer.Option(help="of delimited text (default comma, tab for .tsv)")] = None,
    repeats: Annotated[int, typer.Option(help="shuffles of each column", min=1, max=1000)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Show how much a model relies on each column: from the model alone, or on public records.

    Without --public-data nothing but the model is read, which costs no privacy. Scores of private records are a
    release that nobody has paid for: give public ones.

    Example: weightclip importances model/
    """
    from weightclip.tabular import Model, model_importances, permuted
    from weightclip.tabular import folder as _folder

    tensors, pipeline, _ = _folder.load(model)
    fitted = Model.load(tensors, pipeline)
    if public_data is None:
        if target is not None or delimiter is not None:
            raise WeightclipError("--target and --delimiter belong to --public-data.")
        found = model_importances(fitted)
    else:
        found = permuted(fitted, *_labelled(fitted, public_data, delimiter, target or fitted.target), repeats, 0)
    print(json.dumps(found.to_json()) if as_json else found)


def _labelled(fitted: Any, path: Path, delimiter: str | None, target: str) -> tuple[Any, Any]:
    """Raw values and labels of a table: places in the list of classes, or numbers."""
    import numpy as np

    from weightclip.tabular import canonical, to_numbers
    from weightclip.tabular import files as _files

    file = _files.File(path, delimiter)
    if target not in file.header():
        raise WeightclipError(f"--target: {path} has no column {target!r}, which should hold the labels.")
    values, labels = [], []
    for block in file.blocks([*(c.name for c in fitted.encoder.columns), target]):
        values.append(_files.features(fitted.encoder.columns, block, path, sum(map(len, values))))
        labels += list(block[target])
    if fitted.task == "classification":
        places = {canonical(c): i for i, c in enumerate(fitted.classes)}
        return np.concatenate(values), np.array([places.get(canonical(v), -1) for v in labels])
    numbers = to_numbers(labels)
    known = np.isfinite(numbers)
    return np.concatenate(values)[known], numbers[known]
