"""``weightclip predict``: predictions of a model folder for a new table.

The file they go to is written whole or not at all, and only where a plain file may stand.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import typer

from weightclip.errors import WeightclipError


def predict(
    model: Annotated[Path, typer.Argument(help="model folder")],
    data: Annotated[Path, typer.Argument(help="table: .csv, .tsv (also .gz), .parquet, .arrow or .feather")],
    out: Annotated[Path | None, typer.Option(help="CSV file to write (default: standard output)")] = None,
    proba: Annotated[bool, typer.Option(help="add the probability of every class")] = False,
    delimiter: Annotated[str | None, typer.Option(help="of delimited text (default comma, tab for .tsv)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per record instead of CSV")] = False,
) -> None:
    """Predict for every row of a table, in order; nothing is trained and no privacy is spent.

    Example: weightclip predict model/ new.csv --out predictions.csv --proba
    """
    from weightclip.tabular import Model
    from weightclip.tabular import files as _files
    from weightclip.tabular import folder as _folder
    from weightclip.text import from_pipeline

    source: _files.Source = _files.File(data, delimiter)
    if out is not None:
        _check_file(out, data)
    tensors, pipeline, _ = _folder.load(model)
    fitted = Model.load(tensors, pipeline)
    if "text" in pipeline:
        source = from_pipeline(source, pipeline["text"], tensors)
    if proba and fitted.task != "classification":
        raise WeightclipError(f"--proba: {model} predicts numbers, not classes.")
    if out is None:
        _write(fitted, source, sys.stdout, proba, as_json)
        return
    with _whole_file(out) as file:
        _write(fitted, source, file, proba, as_json)


def _write(model, source, file: IO[str], proba: bool, as_json: bool) -> None:
    from weightclip.tabular.files import features

    name = model.target or "prediction"
    heads = [name, *(f"P({c})" for c in model.classes)] if proba else [name]
    writer = csv.writer(file, lineterminator="\n")
    begun, row, unknown = False, 0, Counter[str]()
    for block in source.blocks([c.name for c in model.encoder.columns]):
        values = features(model.encoder.columns, block, source.path, row)
        if not (as_json or begun):  # nothing is printed where the table cannot be read
            writer.writerow(heads)
        begun = True
        row += len(values)
        unknown.update(model.encoder.unknown(values))
        if model.task == "classification":
            p = model.probabilities(values)
            lines = [[model.classes[i]] for i in p.argmax(axis=1)]
            if proba:
                lines = [[*line, *(f"{v:.6g}" for v in q)] for line, q in zip(lines, p, strict=True)]
        else:
            lines = [[float(v)] for v in model.regress(values)]
        if as_json:
            for line in lines:
                numbers = [line[0], *(float(v) for v in line[1:])]
                file.write(json.dumps(dict(zip(heads, numbers, strict=True))) + "\n")
        else:
            writer.writerows(lines)
    for column, count in unknown.items():
        text = f"{count} of {row} values of {column!r} are missing or of categories the model does not know"
        print(f"warning: {text}: they count as zeros.", file=sys.stderr)


def _check_file(path: Path, read: Path) -> None:
    """Refuse what is no plain file, or is the table: replacing a device node or a link is never what was meant."""
    try:
        if os.path.lexists(path):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise WeightclipError(f"--out {path} is a symbolic link: name a plain file.")
            if not stat.S_ISREG(mode):
                what = "a folder" if stat.S_ISDIR(mode) else "no plain file (a device, a pipe or a socket)"
                raise WeightclipError(f"--out {path} is {what}: name a plain file, or leave --out away.")
            if read.exists() and path.samefile(read):
                raise WeightclipError(f"--out {path} is the table that is read: name another file.")
        parent = path.absolute().parent
        if not parent.is_dir():
            raise WeightclipError(f"--out {path}: cannot write it ({parent} is no folder).")
    except OSError as error:
        raise WeightclipError(f"--out {str(path)[:200]}: cannot write it ({error.strerror or error}).") from error


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[IO[str]]:
    """A text file that takes its place when the block ends well, and leaves nothing when it does not."""
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=".weightclip-", dir=path.absolute().parent)
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.umask(mask := os.umask(0o077))  # the only way to read it
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        raise WeightclipError(f"--out {path}: cannot write it ({error.strerror or error}).") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
