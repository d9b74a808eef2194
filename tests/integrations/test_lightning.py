"""Lightning: trainer.fit, automatic optimisation with closures, accumulation and schedulers."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest
import torch
from tests.integrations.kit import DELTA, PRIVACY, net, table, weights
from torch import nn
from torch.utils.data import DataLoader

import weightclip as wc

pl = pytest.importorskip("lightning", reason="lightning is missing: pip install weightclip[test-stock]")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, which uses what torch has deprecated
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    """As in Lightning's first lesson."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss, self.seen = net(), nn.CrossEntropyLoss(), []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = self.loss(self(x), y)
        self.seen.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def fit(privacy=PRIVACY, network: str = "", module=None, **options):
    from weightclip.integrations import make_private_module

    module = module or Module()
    module, loader, callback = make_private_module(
        module, DataLoader(table(), batch_size=24), privacy, epochs=2, network=network
    )
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
                         **options)  # fmt: skip
    start = weights(module)
    trainer.fit(module, loader)
    return module, trainer, callback.engine, start


@pytest.mark.parametrize("size", [None, 8], ids=["whole draws", "pieces"])
def test_fit(size):
    module, trainer, engine, start = fit(dataclasses.replace(PRIVACY, max_physical_batch_size=size))
    pieces = engine.loader.pieces
    assert (pieces > 1) == (size is not None)
    assert engine.steps == 8 == trainer.global_step and len(module.seen) == 8 * pieces
    assert all(map(math.isnan, module.seen))  # type: ignore
    assert torch.isnan(trainer.callback_metrics["train_loss"])
    assert 1.9 < float(trainer.progress_bar_metrics["epsilon"]) <= 2.0
    assert float(trainer.progress_bar_metrics["epsilon"]) == pytest.approx(engine.get_epsilon(DELTA), rel=1e-5)
    assert not torch.equal(weights(module), start)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**8)


def test_a_checkpoint_goes_on_only_with_the_ledger_of_its_run(tmp_path):
    """Weights of a checkpoint were released before: a run that does not count that would tell a smaller epsilon."""
    from weightclip.integrations import make_private_module

    def fit(privacy, epochs: int, path=None):
        data = DataLoader(table(), batch_size=24)
        module, loader, callback = make_private_module(Module(), data, privacy, epochs=4)
        trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
                             enable_progress_bar=False, enable_model_summary=False, callbacks=[callback])  # fmt: skip
        try:
            trainer.fit(module, loader, ckpt_path=path)
            if path is None:  # predicting is no release
                trainer.save_checkpoint(tmp_path / "seen.ckpt")
                trainer.predict(module, DataLoader(table()[:4][0]), ckpt_path=tmp_path / "seen.ckpt")
        finally:
            callback.engine.detach()
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return callback.engine

    counted = dataclasses.replace(PRIVACY, ledger=tmp_path / "run.ledger")
    assert fit(counted, 2).steps == 8
    for other in (PRIVACY, dataclasses.replace(PRIVACY, ledger=tmp_path / "other.ledger")):
        with pytest.raises(wc.ContractError, match="how often it was released"):
            fit(other, 4, tmp_path / "last.ckpt")
    assert fit(counted, 4, tmp_path / "last.ckpt").steps == 16


def test_a_closure_runs_once_and_before_the_release():
    """What the engine releases is of one evaluation: without noise, equal to a loop without closures."""
    from weightclip.integrations import make_private_module

    released = []
    for frame in (True, False):
        privacy = dataclasses.replace(PRIVACY, epsilon=1e6, settings={"generator": torch.Generator().manual_seed(3)})
        module = Module()
        module, loader, callback = make_private_module(module, DataLoader(table(), batch_size=24), privacy, epochs=1)
        if frame:
            pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback],
                       enable_progress_bar=False, enable_model_summary=False).fit(module, loader)  # fmt: skip
        else:
            (optimizer,), (scheduler,) = module.configure_optimizers()  # type: ignore
            for x, y in loader:
                optimizer.zero_grad()
                module.loss(module(x), y).backward()
                optimizer.step()
                scheduler["scheduler"].step()
        released.append(weights(module))
    torch.testing.assert_close(*released, rtol=0, atol=1e-6)


def test_a_network_inside_the_module():
    class Inside(Module):
        def training_step(self, batch, index):
            return self.loss(self.net(batch[0]), batch[1])

    _, _, engine, _ = fit(network="net", module=Inside())
    assert engine.steps == 8
    with pytest.raises(wc.ContractError, match="output of the private model"):
        fit(module=Inside())  # makes the whole module private, whose forward is not called


def test_what_adds_up_draws_or_clips_sums_is_refused():
    with pytest.raises(wc.ContractError, match="accumulate_grad_batches=3"):
        fit(accumulate_grad_batches=3)
    with pytest.raises(wc.ContractError, match="gradient_clip_val"):
        fit(gradient_clip_val=1.0)
