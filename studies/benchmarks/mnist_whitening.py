"""Which public pictures whiten features of MNIST, dead leaves or bright lines: by the validation split, on a CPU.

Run ``python studies/benchmarks/mnist_whitening.py`` (WEIGHTCLIP_DATA: folder of image sets); one line for each head.
A simulation: heads see ``--records`` of the training records at the sampling rate of the whole study, with as much
noise in a step's mean as there. They are compared with each other, no rows of a table. The test part is not read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from weightclip_studies.data import load_images
from weightclip_studies.images import FeatureMap, HeadTrainer
from weightclip_studies.images._climb import head, start
from weightclip_studies.images._learned import feature_settings
from weightclip_studies.images._noise import NoiseTable
from weightclip_studies.images._product import collect, encode
from weightclip_studies.images.extractor import PLACES

RESULTS = Path(__file__).parents[2] / "results" / "images"
KINDS = ("fixed", "learned", "joined")


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--extractor", default="resnet9-64-seed0")
    asked = parser.parse_args()
    os.environ[PLACES] = str(RESULTS / "extractor")
    images, labels = (torch.from_numpy(a.copy()) for a in load_images("mnist", "train"))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the study's split
    held = len(images) // 10
    rows = torch.cat([order[held : held + asked.records], order[:held]])
    share = asked.records / (len(images) - held)
    noise = NoiseTable(RESULTS / "noise.json")
    for lines in (False, True):
        for kind, features in blocks(lines, asked.extractor, images[rows]).items():
            data = collect(encode(features), labels[rows])
            fit, val = (data.subset(part) for part in torch.arange(len(rows)).split([asked.records, held]))
            length = features[: asked.records].mean(0).norm()
            for epsilon in asked.epsilons:
                settings = head("lip-weights", start(epsilon))
                sigma = noise.get(epsilon, len(images) - held, settings.batch, settings.steps) * share
                small = replace(settings, batch=round(settings.batch * share))
                runs = [HeadTrainer(fit, small, sigma, seed, "whitening").fit() for seed in range(asked.seeds)]
                found = {"lines": lines, "features": kind, "epsilon": epsilon, "mean_length": round(float(length), 3),
                         "validation": [round(run.accuracy(val), 2) for run in runs]}  # fmt: skip
                print(json.dumps(found), flush=True)


def blocks(lines: bool, extractor: str, images: Tensor) -> dict[str, Tensor]:
    """Unit vectors by fixed features, learned ones, and both joined, of one pass."""
    began = time.perf_counter()
    settings = feature_settings("mnist", "joined", RESULTS / "extractor", [extractor])
    learned = settings.learned
    assert learned is not None
    settings, share = replace(settings, lines=lines, learned=replace(learned, lines=lines)), learned.share
    made = FeatureMap(settings, tuple(images.shape[1:]))
    joined = torch.cat([made(part) for part in images.split(250)])
    fixed = replace(settings, learned=None)
    width = FeatureMap(fixed, tuple(images.shape[1:]))(images[:1]).shape[1]
    print(f"# lines={lines}: {joined.shape[1]} features in {time.perf_counter() - began:.0f} s", flush=True)
    return {
        "fixed": joined[:, :width] / math.sqrt(1 - share),
        "learned": joined[:, width:] / math.sqrt(share),
        "joined": joined,
    }


if __name__ == "__main__":
    main()
