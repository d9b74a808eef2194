"""What an interrupted fit keeps: released values, and whether a number was released already."""

from __future__ import annotations

import json

import numpy as np
import pytest

from weightclip.errors import WeightclipError
from weightclip.noise._streams import Streams
from weightclip.tabular._columns import Column
from weightclip.tabular._encoder import fit_private
from weightclip.tabular._private import Door
from weightclip.tabular._resume import Checkpoint, Stage
from weightclip.tabular._table import Table
from weightclip.tabular._target import Target

VALUES = np.column_stack([np.linspace(0, 1, 200), np.arange(200) % 2])
TABLE = Table((Column("a", "numeric"), Column("c", "categorical")), VALUES)


def stage() -> Stage:
    return Stage(fit_private(TABLE, 2.0, 6, Door(Streams.seeded(0)), 200), Target(0.0, 1.0, 0.5, 0.2), 7.0)


@pytest.fixture
def kept(tmp_path) -> Checkpoint:
    return Checkpoint(tmp_path / "m.resume", "options")


def test_a_stage_is_made_once_and_comes_back_as_it_was(kept):
    made = kept.stage(stage)
    again = kept.stage(lambda: pytest.fail("released twice"))
    assert kept.begun and again.target == made.target and again.check == made.check
    assert again.fitted.mechanisms == made.fitted.mechanisms and again.fitted.statements == made.fitted.statements
    assert np.array_equal(again.fitted.encoder.transform(VALUES), made.fitted.encoder.transform(VALUES))


def test_other_options_and_broken_files_are_one_line(kept):
    kept.stage(stage)
    with pytest.raises(WeightclipError, match="other options"):
        Checkpoint(kept.folder, "others").stage(stage)
    for broken in ("", "{}", json.dumps({"options": "options", "stage": {}})):
        (kept.folder / "stage.json").write_text(broken)
        with pytest.raises(WeightclipError, match="cannot be read"):
            kept.stage(stage)


def test_a_number_is_released_once_however_often_the_fit_is_killed(kept):
    kept.stage(stage)

    class Killed(BaseException):
        pass

    def dies() -> tuple[float, float]:
        raise Killed

    with pytest.raises(Killed):
        kept.once(dies, default=(1.0, 0.0))
    assert kept.once(lambda: pytest.fail("released twice"), default=(1.0, 0.0)) == (1.0, 0.0)
    (kept.folder / "look.json").unlink()
    assert kept.once(lambda: (0.25, 0.1), default=(1.0, 0.0)) == (0.25, 0.1)
    assert kept.once(lambda: pytest.fail("released twice"), default=(1.0, 0.0)) == (0.25, 0.1)
