"""Low-rank updates of an encoder: what they compute while they are trained, and what is kept of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import text_kit

from weightclip import WeightclipError
from weightclip.noise import Streams
from weightclip.text import Lora, Update, _lora, load_encoder
from weightclip.text._lora import Classifier, head_weights, words_and_ends


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield text_kit.install(tmp_path_factory.mktemp("encoder"), patch)


def test_what_is_saved_computes_what_was_trained(encoder):
    said, codes = text_kit.sentences(12, 0)
    short = replace(encoder, longest=8)
    network = Classifier(encoder, Lora(rank=2, tokens=8), 3, Streams.seeded(1)).eval()
    with torch.no_grad():
        for layer in network.trained:
            layer.weight.normal_()
        scores = network(words_and_ends(short.padded([*said, "", None])))
        update = network.update()
        tuned = Update.read({**update.tensors(), "layers.0.weight": codes}, 2).applied(short)
        weight, bias = head_weights(network.head)
        features = tuned.features([*said, "", None]) / encoder.width**0.5  # as a model's public scale has it
    assert np.allclose(features @ weight.T + bias, scores.numpy(), atol=1e-4)
    assert not np.allclose(tuned.features(said), short.features(said), atol=1e-2)
    assert np.array_equal(load_encoder("tiny").features(said), encoder.features(said))  # the public one is untouched


def test_a_text_counts_alone(encoder):
    """Padding, blank texts, other texts of the batch and texts that name the padding itself change nothing."""
    network = Classifier(encoder, Lora(rank=2, tokens=8), 1, Streams.seeded(1)).eval().double()
    rows = words_and_ends(replace(encoder, longest=8).padded(["the good film", "", "[PAD] bad bad bad a a a a a a"]))
    alone = torch.cat([network(row[None]) for row in rows])
    assert torch.allclose(network(rows), alone, atol=1e-12) and alone.isfinite().all()
    assert torch.allclose(network(rows[:1, :, :5]), alone[:1], atol=1e-12)
    assert (rows[2, 1] > 0).all() and not (rows[1, 1] > 0).any()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(network.float()(rows).double(), alone, atol=0.1)


def counts_nothing(encoder) -> bool:
    """Whether tokens behind the end of a text change no bit, where attention tells tokens far apart."""
    network = Classifier(encoder, Lora(rank=2, tokens=8), 1, Streams.seeded(1)).eval()
    with torch.no_grad():
        for name, p in network.network.named_parameters():
            if name.endswith(("query.base.weight", "key.weight")):
                p.mul_(100)
    rows = words_and_ends(replace(encoder, longest=8).padded(["the good film"]))
    other = rows.clone()
    other[0, 0][rows[0, 1] == 0] = 5
    assert not torch.equal(rows, other)
    same = []
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            same.append(torch.equal(network(rows), network(other)))
    return all(same)


def test_what_stands_behind_the_end_of_a_text_counts_exactly_nothing(encoder, monkeypatch):
    assert counts_nothing(encoder)
    monkeypatch.setattr(_lora, "_HIDDEN", -30.0)  # the mutant: a mask that sharp attention overcomes
    assert not counts_nothing(encoder)


def test_halves_of_characters_are_read_as_some_text(encoder):
    assert np.isfinite(encoder.features(["good \ud83c film"])).all()
    assert encoder.padded(["good \ud83c film"]).any()


def test_only_head_and_second_factors_are_trained(encoder):
    network = Classifier(encoder, Lora(rank=3, tokens=8), 1, Streams.seeded(1))
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert trained == {"head.weight", "head.bias", *(f"network.{p}.up.weight" for p in network.update().layers)}
    for down, up in network.update().layers.values():
        assert np.allclose(down @ down.T, np.eye(3), atol=1e-5) and not up.any()
    with pytest.raises(WeightclipError, match="--rank must be a whole number"):
        Lora(rank=0)
