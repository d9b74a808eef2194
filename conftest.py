"""Settings of the whole suite: one thread per worker, no display, no test that fails because a machine is slow."""

from __future__ import annotations

import os

os.environ.setdefault("MPLBACKEND", "Agg")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "weightclip",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("weightclip")
