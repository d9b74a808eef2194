"""No record's gradient, as the engine forms it, exceeds its certificate: random networks, climbing records."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from tests._climber import climber, largest_ratio, private_copy
from tests._networks import random_case, simple_cases

NETWORKS, GROUP = 330, 11
SOME = NETWORKS if os.environ.get("WEIGHTCLIP_FULL") == "1" else NETWORKS // 3
# float32 products round by (summands + 8) 2^-24 of the bound, which the engine adds to sensitivities (SOUNDNESS 6)
LIMIT = 1 + 300 * 2.0**-24


@pytest.mark.parametrize("first", range(0, SOME, GROUP))
def test_random_networks(first, record_property):
    worst = 0.0
    for seed in range(first, first + GROUP):
        case = random_case(seed)
        search = climber(case, seed=seed)
        ratio = search.climb(trials=4, steps=8)
        assert ratio <= LIMIT, f"seed {seed}: {ratio} of the certified sensitivity, {case.notes}, p = {case.bounds.p}"
        worst = max(worst, ratio)
        # where the certificate is true, the limit at the product never acts (SOUNDNESS 7): nothing is clipped
        assert search.scaled() <= 1e-5, f"seed {seed}: a record was scaled, {case.notes}, p = {case.bounds.p}"
    record_property("largest ratio", worst)
    assert worst > 0.3  # some network of every group comes near its certificate


SIMPLE = simple_cases()


@pytest.mark.parametrize("name", SIMPLE)
def test_simple_cases_come_close(name, record_property):
    case = SIMPLE[name]
    ratio = max(largest_ratio(case, seed=s, trials=12, steps=60) for s in range(2))
    record_property("largest ratio", ratio)
    assert 0.9 < ratio <= LIMIT


def test_every_strategy_is_drawn():
    notes, losses, exponents = Counter(), Counter(), Counter()
    for seed in range(NETWORKS):
        case = random_case(seed)
        notes.update(case.notes.values())
        losses[type(case.loss).__name__] += 1
        exponents[case.bounds.p] += 1
    strategies = ("weights", "layer radius", "cotangent", "factors", "cap", "mixed", "inner projection")
    assert all(notes[kind] >= 10 for kind in (*strategies, "dense", "conv", "positions"))
    assert len(losses) == 8 and min(losses.values()) >= 10
    assert exponents[1] >= 30 and exponents[float("inf")] >= 30


def test_private_copies_are_what_the_engine_installs():
    """The same classes, limits and hooks as a model made private by the engine itself."""
    import weightclip as wc
    from weightclip.engine._entrance import InputProjection
    from weightclip.factors import is_private

    case = SIMPLE["radii"]
    ours = private_copy(case, ["0", "2"])
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)), batch_size=4
    )
    wc.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=loader, criterion=case.loss,
        noise_multiplier=1.0, bounds=case.bounds, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for a, b in zip(ours.modules(), model.modules(), strict=True):
        hooks = [h for h in b._forward_pre_hooks.values() if isinstance(h, InputProjection)]  # others only refuse
        assert type(a) is type(b) and len(a._forward_pre_hooks) == len(hooks)
        if is_private(a):  # the engine enforces the certified bound besides
            assert torch.equal(a._wc_limits[:2], b._wc_limits[:2])
            assert (a._wc_flags, a._wc_beta, a._wc_product) == (b._wc_flags & 3, b._wc_beta, b._wc_product)
    first = [[h for h in m._forward_pre_hooks.values() if isinstance(h, InputProjection)][0] for m in (ours, model)]
    hook, theirs = first
    assert (hook.radius, hook.detach) == (theirs.radius, theirs.detach)
