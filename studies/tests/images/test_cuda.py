"""What only a GPU can show: rounding of products in other rows, noise and draws of a replayed graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightclip_studies.images._heads import HeadTrainer
from weightclip_studies.images._product import Features
from weightclip_studies.images._settings import HeadSettings
from weightclip_studies.images._whitening import row_sums

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LINEAR = HeadSettings(hidden=0, loss_cap=0.3, batch=8192)
HIDDEN = HeadSettings(hidden=128, loss_cap=0.3, batch=8192, cotangent_radius=0.1, layer_radius=2.0)
CLIPPED = HeadSettings(hidden=128, loss_cap=0.3, batch=8192, weight_norm=2.0)
FLAT = HeadSettings(hidden=128, joint_cap=(0.2, 0.2), batch=8192)


def random_features(records: int, width: int) -> Features:
    """Codes inside the unit ball, made on the GPU."""
    codes = torch.randint(-60, 61, (records + 1, width), dtype=torch.int8, device="cuda")
    codes[-1] = 0
    scale = 1 / (60.5 * width**0.5)
    norms = torch.cat([p.float().norm(dim=1) for p in codes.split(4096)]) * (scale * (1 + 1e-6))
    return Features(codes, scale, norms, torch.randint(0, 10, (records + 1,), device="cuda"))


@pytest.mark.parametrize("settings", [LINEAR, FLAT], ids=["linear", "hidden"])
@pytest.mark.parametrize(("batch", "width"), [(4096, 3984), (8192, 20368), (8192, 64704), (8192, 89280)])
def test_a_record_has_the_same_outputs_one_row_further(settings: HeadSettings, batch: int, width: int) -> None:
    """Taking a record out moves all later ones by a row: their cotangents must not round differently."""
    data = random_features(batch + 100, width)
    trainer = HeadTrainer(data, replace(settings, batch=batch), 1.0, 0)
    trainer.flat.normal_(std=0.5)
    count = -(-(batch + 900) // 16) * 16
    rows = torch.arange(count, device="cuda") % len(data)
    moved = torch.cat([rows[1:], rows.new_tensor([len(data)])])
    first, second = (trainer._forward(data.codes[r].to(trainer.half), trainer.layers) for r in (rows, moved))
    if first[1] is not None and second[1] is not None:
        assert torch.equal(first[1][1:], second[1][:-1])
    assert torch.equal(first[0][1:], second[0][:-1])
    if settings.hidden:
        top = first[0].softmax(1)
        back = [t @ trainer.layers[1][0] for t in (top, torch.cat([top[1:], top[:1]]))]
        assert torch.equal(back[0][1:], back[1][:-1])


@pytest.mark.parametrize("settings", [LINEAR, HIDDEN, CLIPPED, FLAT], ids=["linear", "factors", "weights", "flat"])
def test_replays_draw_fresh_noise_and_fresh_records(settings: HeadSettings) -> None:
    data, sigma, replays = random_features(20_000, 2048), 2.0, 6
    trainer = HeadTrainer(data, settings, sigma, 0)
    draw, seen = trainer.draw, torch.zeros(trainer.rows, dtype=torch.int64, device="cuda")

    def empty() -> torch.Tensor:
        rows = draw()
        seen.copy_(rows)
        return torch.full_like(rows, len(data))

    trainer.draw = empty  # type: ignore[method-assign]
    graph = trainer.capture()
    noises: list[list[torch.Tensor]] = []
    draws: list[torch.Tensor] = []
    for _ in range(replays):
        trainer.replay(graph)
        torch.cuda.synchronize()
        noises.append([])
        for k, (w, b) in enumerate(trainer.gradients):
            unit = torch.cat([w.flatten(), b * settings.bias_scale]) * (trainer.b / float(trainer.scales[k]))
            n = unit.numel()
            assert abs(float(unit.std()) - 1) < 6 / (2 * n) ** 0.5 and abs(float(unit.mean())) < 6 / n**0.5
            noises[-1].append(unit)
        if settings.joint_cap is None:
            shares = (trainer.sensitivities / trainer.scales).square().sum()
            assert float(shares) == pytest.approx(1 / sigma**2, rel=1e-6)
        draws.append(torch.zeros(len(data) + 1, device="cuda").index_fill_(0, seen, 1.0)[:-1])
    for i in range(replays):
        assert abs(float(draws[i].mean()) - trainer.q) < 6 * (trainer.q / len(data)) ** 0.5
        for j in range(i):
            for a, b in zip(noises[i], noises[j], strict=True):
                assert abs(float((a * b).mean())) < 6 / a.numel() ** 0.5
            both = float((draws[i] * draws[j]).mean())
            assert abs(both - trainer.q**2) < 6 * trainer.q / len(data) ** 0.5
    if settings.hidden:  # nor do the layers share any
        n = min(len(noises[0][0]), len(noises[0][1]))
        assert abs(float((noises[0][0][:n] * noises[0][1][:n]).mean())) < 6 / n**0.5


def test_the_first_replay_uses_the_first_weights() -> None:
    data = random_features(4096, 512)
    settings = replace(CLIPPED, batch=4096, weight_norm=50.0, learning_rate=0.5)
    trainer = HeadTrainer(data, settings, 1.0, 0)
    rows = torch.arange(4096, device="cuda")
    expected = trainer.contribution(rows).sensitivities.clone()
    graph = trainer.capture()
    trainer.replay(graph)
    torch.cuda.synchronize()
    assert trainer.sensitivities.tolist() == pytest.approx(expected.tolist(), rel=1e-9)


@pytest.mark.parametrize("length", [147, 243, 1023, 15552])
def test_sums_of_rows_do_not_depend_on_the_row(length: int) -> None:
    x = torch.randn(300, length, device="cuda")
    for first in (1, 2, 3, 5):
        assert torch.equal(row_sums(x)[first:], row_sums(x.roll(-first, 0))[:-first])
