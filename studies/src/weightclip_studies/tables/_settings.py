"""The chosen settings: found by `weightclip-study reproduce search`, shipped with the package, used by the tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

from weightclip.errors import WeightclipError
from weightclip_studies import data as sets

from ._search import GROUPED, Chosen, Effort, search
from ._space import PRIVATE
from ._store import Store

FILE = "chosen.json"


def name_of(method: str, group_norm: bool) -> str:
    """How a method is called in the settings file: "lip-factors", "lip-factors+gn"."""
    return f"{method}+gn" if group_norm else method


def parse_name(name: str) -> tuple[str, bool]:
    """The inverse of :func:`name_of`."""
    return name.removesuffix("+gn"), name.endswith("+gn")


def combinations() -> Iterator[tuple[str, bool]]:
    """Every trained method, without group normalisation and then with it, where it applies."""
    yield from ((method, False) for method in (*PRIVATE, "non-private"))
    yield from ((method, True) for method in PRIVATE)


def load_chosen(path: Path | None = None) -> dict[str, dict[str, Chosen]]:
    """Chosen settings by data set and name.

    Args:
        path: File to read; the one shipped with the package if not given.
    """
    source = resources.files("weightclip_studies.tables") / FILE if path is None else path
    try:
        raw = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise WeightclipError(f"chosen settings: cannot read {source}: {error}") from error
    return {
        dataset: {name: Chosen(**entry) for name, entry in by_name.items()}
        for dataset, by_name in raw["chosen"].items()
    }


def settings_for(by_name: Mapping[str, Chosen], method: str, group_norm: bool) -> Chosen | None:
    """A method's chosen settings; Algorithm 2 as printed has DP-SGD's, unless it was searched itself."""
    found = by_name.get(name_of(method, group_norm))
    if found is None and method == "dp-sgd-published":
        return by_name.get(name_of("dp-sgd", group_norm))
    return found


def adopt(path: Path) -> Path:
    """Make the settings in a file those of the package (in a checkout); the file is read and checked first."""
    load_chosen(path)
    place = Path(__file__).with_name(FILE)
    place.write_bytes(path.read_bytes())
    return place


def save_chosen(chosen: dict[str, dict[str, Chosen]], budget: Effort, path: Path) -> None:
    """Write chosen settings with the budget they were found with."""
    body: dict[str, Any] = {
        "command": "weightclip-study reproduce search",
        "budget": {"trials": budget.trials, **asdict(budget)},
        "chosen": {d: {n: c.to_json() for n, c in sorted(by_name.items())} for d, by_name in sorted(chosen.items())},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def search_one(
    store: Store,
    known: Mapping[str, Chosen],
    dataset: str,
    method: str,
    group_norm: bool,
    budget: Effort,
    progress: Callable[[str], None] | None = None,
) -> Chosen:
    """Search one method on one data set; with group normalisation around what is ``known`` without it, if it is."""
    start = known.get(method) if group_norm else None
    own = budget if start is None else replace(budget, structures=0, parents=GROUPED.parents)
    config = None if start is None else start.config
    return search(store, dataset, method, group_norm, own, start=config, progress=progress)


def search_all(
    store: Store,
    path: Path,
    datasets: Iterable[str] | None = None,
    pairs: Iterable[tuple[str, bool]] | None = None,
    budget: Effort | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Chosen]]:
    """Search every method on every data set; the file is written after each, so that an interruption loses nothing.

    With group normalisation a method starts from what was chosen without it, where that is known.
    """
    budget = budget or Effort()
    chosen = load_chosen(path) if path.exists() else {}
    datasets, pairs = list(datasets or sets.names()), list(pairs or combinations())
    for method, group_norm in pairs:
        for dataset in datasets:
            found = search_one(store, chosen.get(dataset, {}), dataset, method, group_norm, budget, progress)
            if path.exists():  # another worker may have written in the meantime
                chosen = load_chosen(path)
            chosen.setdefault(dataset, {})[name_of(method, group_norm)] = found
            save_chosen(chosen, budget, path)
            if progress is not None:
                progress(f"chosen  {dataset} {name_of(method, group_norm)}: validation accuracy {found.accuracy:.4f}")
    return chosen
