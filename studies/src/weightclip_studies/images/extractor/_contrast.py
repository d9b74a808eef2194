"""SimCLR on synthetic pictures: two views of one picture agree, those of different ones do not (Chen et al., 2020)."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip_studies.images.extractor._draws import Draws
from weightclip_studies.images.extractor._network import Projected, ResNet9
from weightclip_studies.images.extractor._processes import Processes, pictures
from weightclip_studies.images.extractor._views import Views, view

_EVERY = 50  # steps between two looks at the clock and the loss: each look waits for the GPU


@dataclass(frozen=True)
class Recipe:
    """All that decides an extractor; every field is public, and none of it comes from a data set of images.

    Attributes:
        seed: Seed of pictures, first weights, batches and views.
        width: Channels of the network's first stage.
        images: Number of pictures.
        steps: Training steps; those it took, where its length was a time.
        pairs: Pictures of a batch, two views of each.
        temperature: Of the contrast.
        rate: Largest learning rate of AdamW; it warms up, then falls as a cosine to zero.
        warm: Share of the training in which it warms up.
        decay: Weight decay.
        processes: How pictures are made.
        views: How views are made.
    """

    seed: int = 0
    width: int = 64
    images: int = 600_000
    steps: int = 10_000
    pairs: int = 1024
    temperature: float = 0.2
    rate: float = 2e-3
    warm: float = 0.05
    decay: float = 1e-4
    processes: Processes = field(default_factory=Processes)
    views: Views = field(default_factory=Views)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """From what `to_dict` gave."""
        return cls(**{**values, "processes": Processes(**values["processes"]), "views": Views(**values["views"])})

    def rate_at(self, done: float) -> float:
        """Learning rate when a share ``done`` of the training is over."""
        if done < self.warm:
            return self.rate * done / self.warm
        return self.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - self.warm) / (1 - self.warm))))


def contrast(z: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy of finding each view's partner among all others; the first half's partners are the second."""
    n = len(z) // 2
    likeness = z @ z.t() / temperature
    likeness = likeness.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), -math.inf)
    partner = torch.arange(2 * n, device=z.device).roll(n)
    return nn.functional.cross_entropy(likeness, partner)


@contextlib.contextmanager
def _tuned() -> Iterator[None]:
    """Convolutions by the fastest algorithm that was found for their sizes, which never change here."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
        yield


class ContrastiveTraining:
    """Trains one extractor; goes on from its checkpoint where there is one.

    Step t's batch and views come from a stream named by seed and t, so a run that was interrupted draws what it would
    have drawn. Rounding on a GPU may differ from run to run, and so does the number of steps where a time is given: the
    learning rate then follows the clock, and is zero when time is over however busy the machine was.

    Args:
        recipe: What to train.
        device: "cpu" or "cuda".
        folder: Where the checkpoint lies, None for none.
        length: Seconds of the whole training, in place of the recipe's steps.
        compiled: Compile the network; None: on CUDA.
        say: Told how far it has come.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: str = "cpu",
        folder: Path | None = None,
        length: float | None = None,
        compiled: bool | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.recipe, self.device, self.say = recipe, torch.device(device), say
        self.folder, self.length = (None if folder is None else Path(folder)), length
        began = time.perf_counter()
        self.images = pictures(recipe.images, recipe.processes, recipe.seed, device, source=device, say=say)
        self._wait()
        say(f"{recipe.images} pictures in {time.perf_counter() - began:.1f} s")
        self._begin()
        self._forward: Callable[[Tensor], Tensor] = self.model
        if compiled if compiled is not None else self.device.type == "cuda":
            self._forward = self._compiled()
            self._begin(again=True)
        self.step, self.seconds = 0, 0.0
        self.losses: list[tuple[int, float]] = []
        self._load()

    # -- one step ------------------------------------------------------------------------------------------------------

    def _begin(self, again: bool = False) -> None:
        """First weights, by the seed alone; in place where there is a model already, which may be compiled."""
        state = torch.random.get_rng_state()
        torch.manual_seed(self.recipe.seed)
        fresh = Projected(self.recipe.width)
        torch.random.set_rng_state(state)
        if again:
            self.model.load_state_dict(fresh.state_dict())
        else:
            self.model = fresh.to(self.device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.recipe.rate,
            weight_decay=self.recipe.decay,
            fused=self.device.type == "cuda",
        )

    def _compiled(self) -> Callable[[Tensor], Tensor]:
        """The compiled network, after it made two steps; the plain one where compiling fails."""
        began = time.perf_counter()
        plain, self._forward = self._forward, torch.compile(self.model)
        try:
            for t in range(2):
                self._one(t, 0.0)
            self._wait()
        except Exception as error:  # whatever fails here, the plain network is right, and slower
            warnings.warn(f"the network is not compiled: {type(error).__name__}: {error}", stacklevel=3)
            return plain
        self.say(f"compiled in {time.perf_counter() - began:.1f} s")
        return self._forward

    def batch(self, step: int) -> Tensor:
        """Both views of the pictures of a step, partners half a batch apart."""
        r = self.recipe
        draws = Draws("batch", r.seed, step, device=self.device, source=self.device)
        chosen = self.images[draws.whole(len(self.images), r.pairs)]
        both = [view(chosen, r.views, draws) for _ in range(2)]
        return torch.cat(both).contiguous(memory_format=torch.channels_last)

    def _one(self, step: int, done: float) -> Tensor:
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(done)
        batch = self.batch(step)  # in single precision: half of it would shift pixels and colours
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            z = self._forward(batch)
        loss = contrast(z, self.recipe.temperature)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    # -- whole runs ----------------------------------------------------------------------------------------------------

    @property
    def done(self) -> float:
        """Share of the training that is over."""
        return self.step / self.recipe.steps if self.length is None else self.seconds / self.length

    @_tuned()
    def run(self, within: float = math.inf, keep: Callable[[], object] = lambda: None, every: float = 60.0) -> bool:
        """Train to the end (True) or until ``within`` seconds have passed (False); keeps a checkpoint.

        ``keep`` is called with each checkpoint before the last, every so many seconds.
        """
        began = told = saved = time.perf_counter()
        before = looked = self.seconds
        pace, since = 0.0, self.step  # seconds of a step, guessed from the last ones between two looks at the clock
        while self.done < 1:
            half = 0.5 / self.recipe.steps if self.length is None else 0.0  # the middle of the step
            loss = self._one(self.step, self.done + half)
            self.step += 1
            self.seconds += pace
            if self.step % _EVERY and self.done < 1:
                continue
            last = float(loss)  # waits for the GPU
            now = time.perf_counter()
            self.seconds = before + now - began
            pace, looked, since = (self.seconds - looked) / (self.step - since), self.seconds, self.step
            self.losses.append((self.step, last))
            if not math.isfinite(last):
                raise WeightclipError(f"the loss is not finite at step {self.step}: lower the learning rate")
            if now - told > 10:
                told = now
                self.say(f"step {self.step}, {self.done:.1%}, loss {last:.3f}, {1000 * pace:.1f} ms a step")
            if now - began > within:
                break
            if now - saved > every and self.done < 1:
                self._save()
                keep()
                saved = time.perf_counter()
        self._save()
        return self.done >= 1

    def result(self) -> ResNet9:
        """The network for features: batch normalisation folded into constants of training."""
        return self.model.net.folded()

    def taken(self) -> Recipe:
        """The recipe with the steps that were taken."""
        return replace(self.recipe, steps=self.step)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # -- checkpoint ----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": self.recipe.to_dict(), "step": self.step, "seconds": self.seconds, "losses": self.losses,
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip
        path = self.folder / f"training-{self.recipe.seed}.pt"
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def _load(self) -> None:
        path = None if self.folder is None else self.folder / f"training-{self.recipe.seed}.pt"
        if path is None or not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["recipe"] != self.recipe.to_dict():
            raise WeightclipError(f"{path} is of another recipe: take another folder, or give the same options")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]
        self.say(f"goes on at step {self.step}, {self.done:.1%}")
