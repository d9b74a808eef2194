"""The privacy statement of a run, field by field."""

from __future__ import annotations

import json

import pytest
from tests.engine_kit import mlp, private, table

import weightclip as wc
from weightclip.engine._report import NOT_COVERED, as_released


def test_steps_and_epsilon_grow_and_sensitivities_follow_the_weights() -> None:
    run = private(mlp(), table(16), sigma=1.0, batch=4)
    first = run.engine.report(delta=1e-5)
    assert first["mechanisms"] == [] and first["epsilon"] == 0
    run.train()
    second = run.engine.report(delta=1e-5)
    assert second["public"]["steps"] == 4 and second["epsilon"] > 0
    assert second["layers"][0]["sensitivity"] != first["layers"][0]["sensitivity"]
    assert [m["steps"] for m in second["mechanisms"]] == [4]


def test_the_noise_of_the_next_step_is_the_reported_one() -> None:
    run = private(mlp(), table(8), sigma=1.0)
    for _ in range(2):
        reported = [row["noise"] for row in run.engine.report()["layers"]]
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        used = run.engine.training.release.scales(run.engine.training.sensitivity.values).tolist()
        assert used == pytest.approx(reported, rel=1e-12)
        run.optimizer.step()


def test_a_budgeted_run_reports_its_own_delta() -> None:
    run = private(
        mlp(), table(16), sigma=None, batch=4, accountant="rdp", target_epsilon=3.0, target_delta=1e-3, epochs=1
    )
    run.train()
    report = run.engine.report()
    assert report["delta"] == 1e-3 and 2.5 < report["epsilon"] <= 3.0
    assert report["public"]["budget_steps"] == 4
    json.dumps(report, allow_nan=False)


def test_every_gap_is_listed() -> None:
    text = " ".join(NOT_COVERED)
    for gap in ("loss", "initial weights", "search", "errors", "noise", "loop"):
        assert gap in text, gap


def test_place_and_seeds_are_gaps_unless_they_are_closed() -> None:
    for strict, seed in ((False, 0), (True, None)):
        report = private(mlp(), table(8), strict=strict, seed=seed).engine.report()
        gaps = " ".join(report["not_covered"])
        assert ("place: rounding" in gaps) is (not strict) and ("do not compose" in gaps) is (seed is not None)
        assert report["strict"] is strict and report["secure"] is (seed is None)


def test_the_certificate_as_released_is_never_smaller() -> None:
    run = private(mlp(), table(8))
    plain = run.engine.plan.certificate(run.engine.training.sensitivity.evaluate())
    released = as_released(plain, run.engine.training.release)
    for a, b in zip(plain.rows, released.rows, strict=True):
        assert b.sensitivity > a.sensitivity and a.name == b.name
    assert wc.certify(run.model, run.criterion) == released
