"""What a fourth, hostile reading found around tables: shared ledgers, copies of interrupted fits, odd single values."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightclip.accounting import Adjacency, Ledger, Mechanism, read
from weightclip.cli import main
from weightclip.errors import ContractError, WeightclipError
from weightclip.tabular import LipDPClassifier, LipDPRegressor, _fit, _resume
from weightclip.tabular._columns import canonical
from weightclip.tabular._inputs import labels, places_of, weigh
from weightclip.tabular._plan import FitPlan, PrivateScaling
from weightclip.tabular._table import _from_arrow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DELTA, RNG = 1e-6, np.random.default_rng(0)
X = RNG.uniform(-1, 1, (600, 2))
Y = (X[:, 0] > 0).astype(int)


def command(
    folder: Path, name: str, task: str = "classification", ledger: str = "run", epsilon: str = "1"
) -> list[str]:
    file = folder / f"{task}.csv"
    y = Y if task == "classification" else X.sum(1)
    file.write_text("a,b,label\n" + "".join(f"{a},{b},{c}\n" for (a, b), c in zip(X, y, strict=True)))
    budget = ["--epsilon", epsilon, "--delta", str(DELTA), "--accountant", "rdp", "--epochs", "3"]
    places = ["--out", str(folder / name), "--ledger", str(folder / f"{ledger}.ledger")]
    return ["train", str(file), "--target", "label", "--task", task, *budget, *places]


def run(arguments: list[str]) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0)
        return 0
    return 130


@contextlib.contextmanager
def killed_after(charges: int) -> Iterator[None]:
    """No charge comes back after so many."""
    real = Ledger.charge

    def charge(self: Ledger, *args: Any) -> int:
        number = real(self, *args)
        if number + 1 >= charges:
            raise KeyboardInterrupt
        return number

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "charge", charge)
        yield


def total(folder: Path, name: str = "run") -> float:
    return read(folder / f"{name}.ledger").epsilon(DELTA, "rdp")


def other(folder: Path, epsilon: float = 1.0) -> None:
    model = LipDPClassifier(
        epsilon, delta=DELTA, accountant="rdp", epochs=1, classes=[0, 1], ledger=folder / "run.ledger"
    )
    model.fit(X, Y)


# -- one ledger, several fits ------------------------------------------------------------------------------------------


def check_shared(folder: Path) -> None:
    """Another fit on the ledger, before the training or while it was interrupted, leaves the total within epsilon."""
    real = _resume.Checkpoint.stage
    with pytest.MonkeyPatch.context() as patch:

        def stage(self: Any, *args: Any) -> Any:
            found = real(self, *args)
            other(folder)
            return found

        patch.setattr(_resume.Checkpoint, "stage", stage)
        assert run(command(folder, "first")) != 0 and not (folder / "first").exists()
    assert total(folder) <= 1.0
    (folder / "run.ledger").unlink()
    with killed_after(8):
        assert run(command(folder, "second")) == 130
    other(folder)
    assert run([*command(folder, "second"), "--resume"]) != 0 and not (folder / "second").exists()
    assert total(folder) <= 1.0


def test_fits_that_share_a_ledger_stay_within_epsilon_together(tmp_path) -> None:
    check_shared(tmp_path)


def check_swapped(folder: Path) -> None:
    """A fit that goes on does so on its own ledger."""
    with killed_after(4):  # before a checkpoint of the engine, which knows its ledger
        assert run(command(folder, "first", ledger="one")) == 130
    assert run(command(folder, "else", ledger="two", epsilon="0.2")) == 0
    before = total(folder, "two")
    assert run([*command(folder, "first", ledger="two"), "--resume"]) != 0
    assert total(folder, "two") == before and not (folder / "first").exists()
    assert run([*command(folder, "first", ledger="one"), "--resume"]) == 0
    with killed_after(3):  # after the last of the statistics
        assert run(command(folder, "third", ledger="three")) == 130
    same = read(folder / "three.ledger").charges
    book = Ledger(folder / "four.ledger")
    for _ in range(same):  # as many charges, of others
        book.begin(Mechanism("gaussian", 1.0, 1.0, 1), Adjacency.ADD_OR_REMOVE_ONE, 0.0, {})
        book.charge()
    book.close()
    before = total(folder, "four")
    assert run([*command(folder, "third", ledger="four"), "--resume"]) != 0 and total(folder, "four") == before


def test_an_interrupted_fit_does_not_go_on_with_another_ledger(tmp_path) -> None:
    check_swapped(tmp_path)


def check_copied(folder: Path) -> None:
    """Of two copies of an interrupted fit one makes the last look, and its charge is in the ledger."""
    looks = []
    real = _fit.agreement
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fit, "agreement", lambda *args: looks.append(1) or real(*args))
        with killed_after(9):
            assert run(command(folder, "one", "regression")) == 130
        shutil.copytree(folder / "one.resume", folder / "two.resume")
        ended = [run([*command(folder, name, "regression"), "--resume"]) for name in ("one", "two")]
    assert ended[0] == 0 and len(looks) == 1
    assert total(folder) <= 1.0
    labels_of = [m.label for m in read(folder / "run.ledger").mechanisms()]
    assert labels_of.count("agreement of predictions and targets") == 1
    report = json.loads((folder / "one" / "privacy.json").read_text())
    assert report["epsilon"] == pytest.approx(total(folder), rel=1e-6)


def test_a_copy_of_an_interrupted_fit_looks_no_second_time(tmp_path) -> None:
    check_copied(tmp_path)


def test_a_look_whose_result_was_lost_is_not_made_again(tmp_path) -> None:
    """Killed between the charge and the result: the fit ends, with the look charged once and nothing released by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fit, "agreement", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(command(tmp_path, "one", "regression")) == 130
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fit, "agreement", lambda *args: pytest.fail("released twice"))
        assert run([*command(tmp_path, "one", "regression"), "--resume"]) == 0
    assert total(tmp_path) <= 1.0


def test_an_estimator_charges_its_last_look(tmp_path) -> None:
    model = LipDPRegressor(1.0, delta=DELTA, accountant="rdp", epochs=2, ledger=tmp_path / "run.ledger")
    model.fit(X, X.sum(1))
    assert total(tmp_path) == pytest.approx(model.epsilon_, rel=1e-9)


# -- one record, all records -------------------------------------------------------------------------------------------


def check_rounding() -> None:
    """Whether features are kept in half precision follows from the declared number of records, not the real one."""
    seen: list[Any] = []
    real = _fit.train

    def fit(rows: int) -> None:
        model = LipDPClassifier(1.0, delta=DELTA, epochs=1, classes=[0, 1], n_records=500, feature_bounds=(-1, 1))
        model.fit(X[:rows], Y[:rows])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fit, "train", lambda records, *a, **k: seen.append(records.features) or real(records, *a, **k))
        fit(500)
        patch.setattr(_fit, "_IN_MEMORY", 500 * seen[0].shape[1] * 4)
        for rows in (400, 600):
            fit(rows)
    kinds = [features.dtype for features in seen[1:]]
    assert kinds[0] == kinds[1]


def test_one_record_does_not_decide_how_all_are_rounded() -> None:
    check_rounding()


PLAN = FitPlan(1.0, DELTA, PrivateScaling())


def check_weights() -> None:
    """One odd weight in a list is one missing weight."""
    plain = weigh(PLAN, [1.0, 0.5, 0.25], 3).weights
    for odd in (1j, [1], "x", None, object()):
        found = weigh(PLAN, [1.0, odd, 0.25], 3).weights
        assert found is not None and plain is not None
        assert np.array_equal(found[[0, 2]], plain[[0, 2]]) and np.isnan(found[1])
    with pytest.raises(WeightclipError, match="expected"):
        weigh(PLAN, [[1.0], [0.5], [0.25]], 3)


def test_one_odd_weight_changes_no_other() -> None:
    check_weights()


def check_labels() -> None:
    """A null beside large integers is one missing label, whatever holds them."""
    pandas, polars, arrow = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))
    classes = np.array([2**53 + 1, 2**53 + 3])
    values = [2**53 + 1, 2**53 + 3, None, 2**53 + 3]
    held = (pandas.Series(values, dtype="Int64"), polars.Series(values), arrow.chunked_array([values]), values)
    for y in held:
        assert places_of(labels(y, True), classes).tolist() == [0, 1, -1, 1], type(y)


def test_a_missing_label_changes_no_other() -> None:
    check_labels()


@pytest.mark.parametrize("kind", ["timestamp[s]", "date32", "duration[s]"])
def test_a_date_beyond_pythons_calendar_is_missing(kind: str) -> None:
    """And changes nobody else's."""
    arrow = pytest.importorskip("pyarrow")
    short = kind == "date32"
    held = arrow.int32() if short else arrow.int64()
    near, far = [10, 20, 30], [10, 2**31 - 1 if short else 2**62, 30]
    columns = [arrow.chunked_array([arrow.array(values, held).view(_type(arrow, kind))]) for values in (near, far)]
    usual, odd = (_from_arrow(column) for column in columns)
    assert odd[1] is None and usual[1] is not None and [odd[0], odd[2]] == [usual[0], usual[2]]


def _type(arrow: Any, kind: str) -> Any:
    return {"timestamp[s]": arrow.timestamp("s"), "date32": arrow.date32(), "duration[s]": arrow.duration("s")}[kind]


def test_no_target_is_printed_in_an_error() -> None:
    secret = 31337.25
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            LipDPRegressor(1.0, delta=DELTA, epochs=1).fit(X[:5], [secret, 2, 3, 4, 1j])
        except Exception as error:
            assert "31337" not in str(error) and "3.1337" not in str(error)


def check_spelling() -> None:
    """Somebody's own class whose text is compared in its own way is text like any other's."""

    class Text(str):
        def __hash__(self) -> int:
            return 0

        def __eq__(self, other: object) -> bool:
            return True

    class Odd:
        def __str__(self) -> str:
            return Text("f")

    assert type(canonical(Odd())) is str


def test_text_of_ones_own_is_plain_text() -> None:
    check_spelling()


def test_the_tail_of_draws_is_part_of_what_is_reported(tmp_path) -> None:
    """At a delta as small as the chance that a draw exceeds b_max over all steps, report and ledger agree."""
    settings = {"epochs": 200, "batch_fraction": 0.05, "classes": [0, 1], "feature_bounds": (-1, 1)}
    model = LipDPClassifier(1.0, delta=1e-20, accountant="rdp", ledger=tmp_path / "l", **settings)
    model.fit(X, Y)
    assert read(tmp_path / "l").epsilon(1e-20, "rdp") == pytest.approx(model.epsilon_, rel=1e-9)
    assert model.epsilon_ <= 1.0


def test_fits_in_a_row_are_refused_by_the_ledger_they_share(tmp_path) -> None:
    """Without checkpoints as before: another fit between statistics and training."""
    real = _fit._kept
    done = functools.partial(other, tmp_path, 0.5)
    with pytest.MonkeyPatch.context() as patch:

        def kept(plan: Any, make: Any) -> Any:
            found = real(plan, make)
            patch.setattr(_fit, "_kept", real)
            done()
            return found

        patch.setattr(_fit, "_kept", kept)
        with pytest.raises(ContractError, match="another run"):
            other(tmp_path)
