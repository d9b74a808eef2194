"""A table in a file whose text column is replaced by an encoder's numbers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError
from weightclip.tabular import Column, Schema, canonical
from weightclip.tabular.files import Block, File, refuse_one_class
from weightclip.text._encoder import TextEncoder, load_encoder
from weightclip.text._lora import Update

RANGE, WHOLE = 0.15, 1.0
"""Public ranges of each number of a vector of length one: of nearly all over some hundred places, what lies beyond is
cut; and of all."""
_STRINGS = ("string", "large_string")  # what Arrow calls them


def feature_columns(text: str, width: int, reach: float) -> tuple[Column, ...]:
    """Columns of the numbers that a text becomes, from -reach to reach."""
    return tuple(Column(f"{text} #{j}", "numeric", -reach, reach) for j in range(width))


@dataclass(frozen=True, eq=False)
class TextFile:
    """A file seen through an encoder: the columns are the encoder's numbers, and the target where it is asked for.

    Formal guarantees:
        A row's numbers are a function of its own text (`TextEncoder.features`); no statistic of the column is read.
    """

    file: File  #: the file
    text: str  #: name of the column that holds the text
    encoder: TextEncoder  #: what turns it into numbers
    shown: Callable[[int], None] | None = None  #: told how many texts are encoded

    is_text = False  # types of its columns are declared, not guessed

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self.file.path

    @property
    def columns(self) -> tuple[Column, ...]:
        """The encoder's numbers, with their public range."""
        return feature_columns(self.text, self.encoder.width, RANGE)

    def header(self) -> list[str]:
        """Names of its columns: other columns of the file come last."""
        names = self.file.header()
        if self.text not in names:
            near = difflib.get_close_matches(self.text, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"its header names {len(names)} others."
            raise WeightclipError(f"{self.path} has no column {self.text!r}: {hint}")
        held = self.file.types().get(self.text, "string").removeprefix("dictionary<values=")
        if not held.startswith(_STRINGS):
            kind = self.file.kinds()[self.text].kind
            raise self._no_text(f"{held if kind == 'categorical' else kind} values, not text")
        if taken := {c.name for c in self.columns} & set(names):
            raise WeightclipError(f"{self.path}: column {min(taken)!r} is named as a number of the text is: rename it.")
        return [*(c.name for c in self.columns), *(name for name in names if name != self.text)]

    def kinds(self) -> dict[str, Column]:
        """What is declared of the columns."""
        others = {name: kind for name, kind in self.file.kinds().items() if name != self.text}
        return {**{c.name: c for c in self.columns}, **others}

    def nested(self) -> set[str]:
        """Names of columns that hold lists or records."""
        return self.file.nested()

    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[Block]:
        """Rows, some at a time, by column name."""
        others = [name for name in self.header()[len(self.columns) :] if columns is None or name in columns]
        done = 0
        for block in self.file.blocks([self.text, *others]):
            raw = block[self.text]
            texts = [canonical(v) for v in (raw if isinstance(raw, list) else raw.tolist())]
            before = done
            numbers = self._numbers(texts, lambda i: self._tell(before + i))  # noqa: B023
            done += len(texts)
            named = {c.name: numbers[:, j].astype(np.float64) for j, c in enumerate(self.columns)}
            yield {**named, **{name: block[name] for name in others}}

    def schema(self, known: Schema, target: str) -> Schema:
        """What is publicly known, told of the encoder's numbers; columns besides text and target are left out."""
        if self.text == target:
            raise WeightclipError(f"column {target!r} cannot be the text and the target.")
        if known.columns:
            raise WeightclipError(f"column {known.columns[0].name!r} is described, but --text reads one column alone.")
        rest = tuple(name for name in self.header()[len(self.columns) :] if name != target)
        return replace(known, columns=self.columns, ignore=rest)

    def check(self, target: str | None) -> None:
        """Refuse a file from which nothing can be learned, before any text is encoded.

        Args:
            target: Name of the column of classes, where they are not declared.

        Raises:
            WeightclipError: All texts are blank or numbers, or there are less than two classes.

        Formal guarantees:
            None. That a column holds text, and which classes there are, counts as public, as the report says.
        """
        target = target if target in self.header() else None  # which `load` refuses
        written, found, classes = 0, False, set[str]()
        for block in self.file.blocks([self.text] if target is None else [self.text, target]):
            for value in block[self.text]:
                if not found and (text := canonical(value)) is not None and text.strip():
                    written, found = written + 1, not _is_number(text)
            if target is not None:
                classes.update(label for value in block[target] if (label := canonical(value)) is not None)
            if found and (target is None or len(classes) > 1):
                return
            if len(block[self.text]) == 0:  # which `load` refuses
                return
        if not found:
            raise self._no_text("numeric values, not text" if written else "no text: all rows are blank")
        if target is not None:
            refuse_one_class(self.path, target, classes)

    def _no_text(self, held: str) -> WeightclipError:
        return WeightclipError(f"{self.path}: column {self.text!r} holds {held}; name a column of words by --text.")

    def described(self) -> dict[str, str]:
        """What a model folder keeps of it, so that prediction reads a table the same way."""
        return {"column": self.text, "encoder": self.encoder.name, "sha256": self.encoder.digest}

    def _numbers(self, texts: list[str | None], shown: Callable[[int], None]) -> np.ndarray:
        return self.encoder.features(texts, shown)

    def _tell(self, done: int) -> None:
        if self.shown is not None:
            self.shown(done)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class TokenFile(TextFile):
    """A file whose text is read as token numbers (`TextEncoder.padded`): what an encoder is fine-tuned on.

    Formal guarantees:
        A row's numbers are a function of its own text.
    """

    @property
    def columns(self) -> tuple[Column, ...]:
        """Places of tokens."""
        return tuple(Column(f"{self.text} #{j}", "numeric") for j in range(self.encoder.longest))

    def _numbers(self, texts: list[str | None], shown: Callable[[int], None]) -> np.ndarray:
        return self.encoder.padded(texts, shown)


def from_pipeline(file: File, entry: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> TextFile:
    """The file as a model was trained to read it.

    Args:
        file: The file.
        entry: What `TextFile.described` gave, with the rank of updates and the number of tokens where there are any.
        tensors: The model's arrays: they hold the updates of a fine-tuned encoder.

    Raises:
        WeightclipError: The encoder is missing, or is not the one of training.
    """
    encoder = load_encoder(str(entry["encoder"]))
    if encoder.digest != entry["sha256"]:
        raise WeightclipError(f"encoder {encoder.name!r} has other weights than the one this model was trained on.")
    if "lora" in entry:
        update = Update.read(tensors, int(entry["lora"]["rank"]))
        encoder = update.applied(replace(encoder, longest=int(entry["lora"]["tokens"])))
    return TextFile(file, str(entry["column"]), encoder)
