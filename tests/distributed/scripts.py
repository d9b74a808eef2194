"""Loops of other libraries on several processes, for torchrun: ``scripts.py accelerate`` or ``... lightning``."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weightclip.integrations import Privacy

EPOCHS = 2


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=24)


def net() -> nn.Module:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # the engine starts all from rank 0
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def privacy() -> Privacy:
    settings = {"exact_sums": True, "generator": torch.Generator().manual_seed(0)}
    return Privacy(2.0, 1e-5, max_physical_batch_size=8, settings=settings)


def by_accelerate() -> tuple[nn.Module, int]:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    from weightclip.integrations import prepare

    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer, loader, loss = prepare(
        accelerator, privacy(), epochs=EPOCHS, module=model, optimizer=torch.optim.SGD(model.parameters(), 0.5),
        data_loader=data(), criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return model, loader.engine.steps


def by_lightning() -> tuple[nn.Module, int]:
    import lightning as L  # pyright: ignore[reportMissingImports]

    from weightclip.integrations import PlainDDP, make_private_module

    class Small(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = net(), nn.CrossEntropyLoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return self.loss(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.5)

    module, loader, callback = make_private_module(Small(), data(), privacy(), epochs=EPOCHS)
    world = dist.get_world_size()
    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=world, strategy=PlainDDP() if world > 1 else "auto",
        logger=False, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
        callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module, loader)  # type: ignore[arg-type]
    return callback.engine.training.model, callback.engine.steps


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "lightning":
        dist.init_process_group("gloo")
    model, steps = by_accelerate() if sys.argv[1] == "accelerate" else by_lightning()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(steps, [float(p.detach().double().sum()) for p in model.parameters()])
    if dist.is_initialized():
        dist.destroy_process_group()
