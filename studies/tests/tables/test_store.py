"""The results store: canonical keys, resuming, damage, parallel workers."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from pathlib import Path

import pytest

from weightclip.errors import WeightclipError
from weightclip_studies.tables._store import Store, canonical, settings_hash


def test_canonical_text_ignores_order_and_float_spelling():
    assert canonical({"a": 1.0, "b": [1, 2]}) == canonical({"b": (1, 2), "a": 1})
    assert settings_hash({"a": 0.1}) != settings_hash({"a": 0.2})
    assert settings_hash({"a": True}) != settings_hash({"a": 1})


@pytest.mark.parametrize("bad", [{"a": float("nan")}, {"a": float("inf")}, {1: 2}, {"a": object()}])
def test_keys_that_have_no_one_spelling_are_refused(bad):
    with pytest.raises(WeightclipError, match="a key must"):
        canonical(bad)


def test_nothing_is_computed_twice(tmp_path: Path):
    store, asked = Store(tmp_path / "s.sqlite"), []

    def work(keys):
        asked.extend(k["x"] for k in keys)
        return [{"square": k["x"] ** 2} for k in keys]

    keys = [{"x": i} for i in range(4)]
    assert [v["square"] for v in store.compute(keys[:2], work)] == [0, 1]
    assert [v["square"] for v in Store(tmp_path / "s.sqlite").compute(keys, work)] == [0, 1, 4, 9]
    assert asked == [0, 1, 2, 3]


def test_a_damaged_or_partial_row_is_redone(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    store = Store(path)
    for i in range(4):
        store.put({"x": i}, {"v": i})
    with sqlite3.connect(path) as db:
        change = "UPDATE runs SET {} WHERE hash = ?"
        db.execute(change.format("value = '{\"v\": 77}'"), (settings_hash({"x": 0}),))  # checksum no longer fits
        db.execute(change.format("value = substr(value, 1, 3)"), (settings_hash({"x": 1}),))
        db.execute(change.format("value = NULL, checksum = NULL"), (settings_hash({"x": 2}),))
    db.close()
    keys = [{"x": i} for i in range(4)]
    assert [v is None for v in store.get_many(keys)] == [True, True, True, False]
    redone = store.compute(keys, lambda missing: [{"v": 10 + k["x"]} for k in missing])
    assert [v["v"] for v in redone] == [10, 11, 12, 3]


def test_a_failed_computation_leaves_no_claim(tmp_path: Path):
    store = Store(tmp_path / "s.sqlite")

    def fails(keys):
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        store.compute([{"x": 1}], fails)
    other = Store(tmp_path / "s.sqlite")
    assert other.claim([{"x": 1}]) == [True]


def test_claims_exclude_others_until_they_lapse(tmp_path: Path):
    first, second = Store(tmp_path / "s.sqlite"), Store(tmp_path / "s.sqlite")
    assert first.claim([{"x": 1}]) == [True]
    assert second.claim([{"x": 1}, {"x": 2}]) == [False, True]
    late = Store(tmp_path / "s.sqlite", lapse=0.0)
    assert late.claim([{"x": 1}]) == [True]


def _claims_and_dies(path: str) -> None:
    Store(path).claim([{"x": 1}])
    os._exit(9)  # as if killed: nothing is cleaned up


def test_what_a_killed_worker_had_begun_is_redone_at_once(tmp_path: Path):
    path = str(tmp_path / "s.sqlite")
    worker = multiprocessing.get_context("fork").Process(target=_claims_and_dies, args=(path,))
    worker.start()
    worker.join(30)
    assert worker.exitcode == 9
    assert Store(path).compute([{"x": 1}], lambda keys: [{"v": 5}]) == [{"v": 5}]


def _worker(path: str, log: str) -> None:
    def work(keys):
        with open(log, "a", encoding="utf-8") as file:
            file.writelines(f"{k['x']}\n" for k in keys)
        return [{"v": k["x"]} for k in keys]

    store = Store(path)
    for i in range(20):
        store.compute([{"x": i}], work, poll=0.01)


def test_two_workers_share_the_work(tmp_path: Path):
    path, log = str(tmp_path / "s.sqlite"), str(tmp_path / "log.txt")
    Store(path)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_worker, args=(path, log)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    computed = (tmp_path / "log.txt").read_text(encoding="utf-8").split()
    assert sorted(map(int, computed)) == list(range(20))  # each once


def test_rows_can_be_filtered(tmp_path: Path):
    store = Store(tmp_path / "s.sqlite")
    store.put({"d": "a", "s": 1}, {"v": 1})
    store.put({"d": "b", "s": 1}, {"v": 2})
    assert [r.value["v"] for r in store.rows(d="b")] == [2]
    assert len(store) == 2


def test_a_file_that_is_no_store_is_named(tmp_path: Path):
    path = tmp_path / "s.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(WeightclipError, match="s.sqlite"):
        Store(path)
