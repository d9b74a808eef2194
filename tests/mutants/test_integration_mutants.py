"""Mistakes in the loops of other libraries, made on purpose: what they print or release must give them away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from weightclip.engine import PrivacyEngine
from weightclip.integrations import Privacy

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def test_losses_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="accelerate is missing: pip install weightclip[test-stock]")
    from tests.integrations.test_accelerate import test_the_usual_loop

    engage = Privacy.engage

    def mutant(self: Privacy, **parts: Any) -> PrivacyEngine:
        engine = engage(self, **parts)
        engine.criterion.shows_values = True
        return engine

    monkeypatch.setattr(Privacy, "engage", mutant)
    with pytest.raises(AssertionError):
        test_the_usual_loop()


def test_pieces_that_count_as_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework's number of batches in place of the public number of pieces."""
    pytest.importorskip("accelerate", reason="accelerate is missing: pip install weightclip[test-stock]")
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
    from tests.integrations.test_accelerate import test_accumulated_gradients_are_pieces_of_one_draw

    kept = property(lambda self: self.gradient_state.num_steps, lambda self, steps: None)
    monkeypatch.setattr(Accelerator, "gradient_accumulation_steps", kept)
    with pytest.raises(Exception, match="multiplied|without a new batch|assert"):
        test_accumulated_gradients_are_pieces_of_one_draw()


def test_logs_with_training_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is missing: pip install weightclip[test-stock]")
    from tests.integrations.test_trainer import test_train

    from weightclip.integrations import _trainer

    monkeypatch.setattr(_trainer, "_PRIVATE", ())
    with pytest.raises(AssertionError):
        test_train(tmp_path)


def test_sizes_of_draws_in_a_history(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    skorch = pytest.importorskip("skorch", reason="skorch is missing: pip install weightclip[test-stock]")
    from tests.integrations.test_skorch import test_fit

    from weightclip.integrations import PrivateNet

    monkeypatch.setattr(PrivateNet, "run_single_epoch", skorch.NeuralNet.run_single_epoch)
    with pytest.raises(AssertionError):
        test_fit(capsys)


def test_a_closure_that_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed on to the optimiser, a closure would compute gradients anew, without noise."""
    pytest.importorskip("lightning", reason="lightning is missing: pip install weightclip[test-stock]")
    from tests.integrations.test_lightning import test_a_closure_runs_once_and_before_the_release

    from weightclip.engine import _step

    def mutant(args: Any, kwargs: Any) -> None:
        for closure in [f for f in (*args[1:], *kwargs.values()) if callable(f)]:
            with torch.enable_grad():
                closure()

    monkeypatch.setattr(_step, "evaluate_closure", mutant)
    with pytest.raises(Exception, match="already taken|new batch|close"):
        test_a_closure_runs_once_and_before_the_release()
