"""A one-run audit of fine-tuning on text: inserted sentences with labels by a coin, guessed from the released model."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weightclip.audit import OneRun, claimed_curve, judge
from weightclip_studies.images._noise import DELTA
from weightclip_studies.text._networks import Part
from weightclip_studies.text._settings import Settings
from weightclip_studies.text._study import Study
from weightclip_studies.text._training import Run


@dataclass(frozen=True)
class Canaries:
    """Sentences of the dev part with a label by a coin, each among the training records by another coin.

    Attributes:
        count: How many.
        seed: Of the coins.
    """

    count: int
    seed: int = 0

    def kept(self, study: Study, part: Part, settings: Settings, epsilon: float) -> dict[str, Any] | None:
        """What `audit` finds, from the study's file if it was there before; None if there is no time left."""
        key = study.key(part, "canaries", repr(self), settings.told(), epsilon)
        runs = 2 * settings.steps(study.size)
        return study.once(
            key, lambda: asdict(self.audit(study, part, settings, epsilon)), study.kind(part, settings), runs
        )

    def sigma(self, study: Study, settings: Settings, epsilon: float) -> float:
        """The noise multiplier of the audited run, calibrated once: inserted sentences are records too."""
        n = study.size + int(self._coins(len(study.data.labels("dev")[: self.count]))[0].sum())
        return study.multiplier(epsilon, n, settings.batch, settings.steps(n))

    def _coins(self, count: int) -> tuple[Tensor, Tensor]:
        """Whether each canary is among the records, and its label."""
        generator = torch.Generator().manual_seed(self.seed)
        present = torch.rand(count, generator=generator) < 0.5
        return present, torch.randint(0, 2, (count,), generator=generator)

    def audit(self, study: Study, part: Part, settings: Settings, epsilon: float) -> OneRun:
        """Train once, guess which canaries were there, and bound ε from below.

        A canary's score is how much better its label is liked than by a model that was trained in the same way, without
        noise, on none of them: that takes out how likely the sentence's label was anyway.

        Formal guarantees:
            The guesses read the weights that the run releases, and public data. If the claim holds, ``epsilon_lower``
            exceeds ``epsilon`` with a chance of at most one in twenty [Steinke2023].
        """
        train, dev, _ = study.inputs(part)
        canaries = dev[: self.count, : train.shape[1]]
        count = len(canaries)
        present, labels = self._coins(count)
        x = torch.cat([train, canaries[present.to(train.device)]])
        y = torch.cat([study.data.labels("train")[: study.records], labels[present]]).to(x.device)
        rate, steps = settings.batch / len(x), settings.steps(len(x))
        sigma = self.sigma(study, settings, epsilon)

        def liked(run: Run) -> Tensor:
            scores = run.scores(canaries)
            return (scores[:, 1] - scores[:, 0]) * (2 * labels - 1)

        model, among = part.model(study.data, self.seed), (study.piece, study.precision)
        without = replace(settings, method="non-private")
        reference = liked(Run(copy.deepcopy(model), train, y[: len(train)], without, 0.0, self.seed, *among))
        scores = (liked(Run(model, x, y, settings, sigma, None, *among)) - reference).double().numpy()
        return judge(scores, present.numpy(), claimed_curve(sigma, rate, steps), epsilon, DELTA, rate, steps)
