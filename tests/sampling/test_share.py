"""Pieces of a draw on several processes: each on one of them, equally many on all."""

from __future__ import annotations

import numpy as np
import pytest

from weightclip.sampling import Share
from weightclip.sampling._draws import Cutter


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("size", "count", "shuffled"), [(None, 1, False), (4, 5, False), (4, 5, True), (3, 1, False)])
@pytest.mark.parametrize("total", [0, 1, 6, 20, 50])
def test_every_piece_is_on_one_rank(ranks: int, size: int | None, count: int, shuffled: bool, total: int) -> None:
    cutter, drawn = Cutter(size, count, shuffled, ranks), np.arange(100, 100 + total)
    whole = list(cutter.cut(3, drawn, total, np.random.default_rng(0)))
    shares = [
        list(Share(rank, ranks).of(cutter.cut(3, drawn, total, np.random.default_rng(0)))) for rank in range(ranks)
    ]
    rounds = Share(0, ranks).rounds(len(whole))
    for rank, share in enumerate(shares):
        assert [piece.number for piece in share] == list(range(rounds)) and {piece.draw for piece in share} == {3}
        assert [piece.last for piece in share] == [False] * (rounds - 1) + [True]
        assert [piece.place for piece in share] == [turn * ranks + rank for turn in range(rounds)]
        for piece in share:
            if piece.place < len(whole):  # the very piece that one process would run
                there = whole[piece.place]
                assert piece.indices.tolist() == there.indices.tolist()
                assert (piece.slots is None) == (there.slots is None)
                assert piece.slots is None or piece.slots.tolist() == there.slots.tolist()
            else:
                assert piece.indices.size == 0 and piece.slots is None
    found = sorted(i for share in shares for piece in share for i in piece.indices.tolist())
    assert found == drawn.tolist()
    if size is None:
        sizes = [share[0].indices.size for share in shares]
        assert rounds == 1 and max(sizes) - min(sizes) <= 1


def test_one_process_runs_what_it_always_ran() -> None:
    cutter = Cutter(4, 3)
    pieces = list(cutter.cut(0, np.arange(9), 9, None))
    alone = list(Share().of(iter(pieces)))
    assert [p.indices.tolist() for p in alone] == [p.indices.tolist() for p in pieces]
    assert [(p.number, p.place, p.last) for p in alone] == [(0, 0, False), (1, 1, False), (2, 2, True)]
