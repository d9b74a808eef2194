"""A sentence encoder of two small layers with random weights, in a package of its own, as encoders come."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from weightclip.text import ENCODERS, TextEncoder, load_encoder
from weightclip.text._encoder import Package

WORDS = ["good", "bad", "fine", "poor", "film", "plot", "a", "the", "and", "very", "not", "long", "dull", "charming"]


def install(folder: Path, patch: pytest.MonkeyPatch, seed: int = 0) -> TextEncoder:
    """Write the package, make it importable and load it as encoder ``tiny``."""
    pytest.importorskip("transformers")
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel

    name = f"tiny_encoder_{seed}"
    model = folder / name / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    config = BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=300)  # fmt: skip
    (model / "config.json").write_text(json.dumps(config.to_dict()))
    torch.manual_seed(seed)
    network = BertModel(config)
    with torch.no_grad():
        network.embeddings.word_embeddings.weight.normal_(0, 1.0)  # so that words matter
    save_file({k: v.clone() for k, v in network.state_dict().items()}, model / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(model / "tokenizer.json"))
    patch.setattr(sys, "path", [str(folder), *sys.path])  # in front: another test may have left one of that name
    patch.delitem(sys.modules, name, raising=False)
    patch.setitem(ENCODERS, "tiny", Package(name, "tiny-encoder"))
    load_encoder.cache_clear()
    return load_encoder("tiny")


def sentences(n: int, seed: int) -> tuple[tuple[str, ...], np.ndarray]:
    """Texts that praise or do not, and which do."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, n)
    words = [["good", "charming"], ["bad", "dull"]]
    texts = [" ".join([*rng.choice(["film", "plot", "a", "the"], 3), *[rng.choice(words[1 - y])] * 3]) for y in labels]
    return tuple(texts), labels
