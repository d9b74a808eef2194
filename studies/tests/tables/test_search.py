"""Search spaces, the search of the tables, and the settings file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weightclip.errors import WeightclipError
from weightclip_studies import data as sets
from weightclip_studies.tables import _search, _settings
from weightclip_studies.tables._search import Chosen, Effort, best_variant, search
from weightclip_studies.tables._settings import load_chosen, name_of, parse_name, save_chosen
from weightclip_studies.tables._space import METHODS, PRIVATE, Choice, Range, our_space, paper_space
from weightclip_studies.tables._store import Store

TINY = Effort(structures=2, rounds=1, parents=1, each=3, seeds=2, large_seeds=2, finalists=2, final_seeds=3)


@pytest.mark.parametrize("group_norm", [False, True])
@pytest.mark.parametrize("method", PRIVATE)
def test_points_and_configurations_correspond(method: str, group_norm: bool):
    space = our_space(method, 1000, group_norm)
    rng = np.random.default_rng(0)
    for config in space.sample(rng, 3, 2) + space.nearby(rng, space.sample(rng, 1, 1)[0], 3):
        again = space.config(space.point(config))
        assert {k: pytest.approx(v, rel=2e-3) if isinstance(v, float) else v for k, v in config.items()} == again
        for name, part in space.fine.items():
            if isinstance(part, Range):
                assert part.low * 0.999 <= config[name] <= part.high * 1.001


def test_every_method_has_the_same_common_space():
    spaces = [our_space(method, 1000) for method in PRIVATE]
    for name in ("width", "batches", "epochs"):
        assert len({space.structure[name] for space in spaces}) == 1
    for name in ("lr", "final_lr", "averaging"):
        assert len({space.fine[name] for space in spaces}) == 1


def test_the_papers_space():
    space = paper_space("dp-sgd")
    assert space.fine["sigma"] == Range(0.4, 5.0) and space.fine["clip"] == Range(1.0, 15.0)
    assert space.fine["lr"] == Range(1e-4, 1e-2)
    assert isinstance(space.structure["batch"], Choice) and space.structure["batch"].values[-1] == 512
    with pytest.raises(WeightclipError, match="joint-cap"):
        paper_space("joint-cap")


def fake_runs(calls: list[int]):
    """Accuracy peaks at lr = 0.03, whatever the rest; seeds add a little."""

    def compute(keys):
        calls.append(len(keys))
        return [
            {"accuracy": 0.9 - abs(np.log(k["config"]["lr"] / 0.03)) / 10 + 1e-4 * (k["seed"] % 3), "auc": 0.5}
            for k in keys
        ]

    return compute


def test_search_finds_the_peak_and_resumes(tmp_path: Path, monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(_search, "compute_runs", fake_runs(calls))
    store = Store(tmp_path / "s.sqlite")
    first = search(store, "breast_cancer", "dp-sgd", budget=TINY)
    assert first.trials == TINY.trials == 9 and first.runs == 9 * 2 + 2 * 3
    tried = [r.key["config"] for r in store.rows()]
    best = min(tried, key=lambda c: abs(np.log(c["lr"] / 0.03)))
    assert first.config == best
    made = len(calls)
    assert search(store, "breast_cancer", "dp-sgd", budget=TINY) == first
    assert len(calls) == made  # everything was in the store
    assert {r.key["part"] for r in store.rows()} == {"valid"}  # the test part is not touched


def test_a_killed_search_continues(tmp_path: Path, monkeypatch):
    calls: list[int] = []
    whole = Store(tmp_path / "whole.sqlite")
    monkeypatch.setattr(_search, "compute_runs", fake_runs(calls))
    expected = search(whole, "breast_cancer", "lip-factors", budget=TINY)

    def dies(keys):
        raise KeyboardInterrupt

    store = Store(tmp_path / "s.sqlite")
    search(store, "breast_cancer", "lip-factors", budget=Effort(2, 0, 1, 3, 2, 2, 1, 1))  # the first stage only
    monkeypatch.setattr(_search, "compute_runs", dies)
    with pytest.raises(KeyboardInterrupt):
        search(store, "breast_cancer", "lip-factors", budget=TINY)
    monkeypatch.setattr(_search, "compute_runs", fake_runs(calls))
    assert search(store, "breast_cancer", "lip-factors", budget=TINY) == expected


def test_settings_file_round_trip(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(_search, "compute_runs", fake_runs([]))
    path = tmp_path / "chosen.json"
    pairs = [("dp-sgd", False), ("lip-factors", True)]
    chosen = _settings.search_all(Store(tmp_path / "s.sqlite"), path, ["breast_cancer"], pairs, TINY)
    assert load_chosen(path) == chosen and set(chosen["breast_cancer"]) == {"dp-sgd", "lip-factors+gn"}
    assert json.loads(path.read_text())["budget"]["trials"] == 9
    with pytest.raises(WeightclipError, match="nowhere"):
        load_chosen(tmp_path / "nowhere.json")


def test_names_and_variants(tmp_path: Path):
    assert [parse_name(name_of(m, g)) for m in METHODS for g in (False, True)] == [
        (m, g) for m in METHODS for g in (False, True)
    ]

    def with_score(value: float) -> Chosen:
        return Chosen({}, value, 0.5, value, 1, 1)

    names = {"dp-sgd": 0.9, "lip-published": 0.99, "lip-factors": 0.7, "joint-cap+gn": 0.8, "non-private": 1.0}
    assert best_variant({n: with_score(v) for n, v in names.items()}) == "joint-cap+gn"
    save_chosen({"adult": {"dp-sgd": with_score(0.5)}}, TINY, tmp_path / "a" / "b.json")
    assert load_chosen(tmp_path / "a" / "b.json")["adult"]["dp-sgd"].score == 0.5


def test_with_group_normalisation_a_search_starts_from_what_is_known(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(_search, "compute_runs", fake_runs([]))
    store = Store(tmp_path / "s.sqlite")
    known = {"dp-sgd": search(store, "breast_cancer", "dp-sgd", budget=TINY)}
    around = _settings.search_one(store, known, "breast_cancer", "dp-sgd", True, TINY)
    anew = _settings.search_one(store, {}, "breast_cancer", "dp-sgd", True, TINY)
    assert around.trials == 2 * TINY.each and anew.trials == TINY.trials
    assert {"group_size", "alpha"} <= set(around.config)


def test_the_committed_settings_were_all_found_with_the_same_budget():
    chosen = load_chosen()
    assert set(chosen) == set(sets.names())
    for dataset, entries in chosen.items():
        # all but Algorithm 2 as printed, which borrows DP-SGD's
        searched = {name_of(*pair) for pair in _settings.combinations() if pair[0] != "dp-sgd-published"}
        assert set(entries) == searched and len(searched) == 2 * (len(PRIVATE) - 1) + 1, dataset
        assert all(_settings.settings_for(entries, *pair) is not None for pair in _settings.combinations())
        for name, entry in entries.items():
            assert entry.trials == (16 if parse_name(name)[1] else Effort().trials), (dataset, name)
