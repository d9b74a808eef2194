"""What a Poisson loader hands out: padding, structure, memory maps, resuming, budgets, refusals."""

from __future__ import annotations

import pickle
import warnings
from collections import namedtuple
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.sampling_kit import Numbers, draws, poisson, tensors
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from weightclip.errors import ContractError, WeightclipError
from weightclip.noise._streams import Streams
from weightclip.sampling import ArrayDataset
from weightclip.sampling._loader import BatchInfo, PoissonLoader

# Empty draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [None, 3])
def test_empty_draw_is_a_zero_record(workers: int, size: int | None) -> None:
    rows = size or 1
    more = {} if size is None else {"max_physical_batch_size": size, "strict": True}
    loader, infos = poisson(Numbers(9, "dict"), q=1e-7, loader={"num_workers": workers}, **more)
    batch = next(iter(loader))
    (info,) = infos
    assert (info.draw, info.piece, info.last, info.rows) == (0, 0, size is None, rows)
    assert info.mask is not None and info.mask.tolist() == [False] * rows
    assert batch["x"].shape == batch["more"][1]["z"].shape == (rows, 2) and batch["more"][0].shape == (rows,)
    assert (batch["x"].dtype, batch["more"][0].dtype) == (torch.float32, torch.int64)
    assert batch["more"][1]["z"].dtype == torch.float64
    assert not batch["x"].any() and not batch["more"][0].any() and not batch["more"][1]["z"].any()


@pytest.mark.parametrize("dataset", [tensors(9), Subset(tensors(9), [4, 5]), Numbers(9)])
def test_empty_draw_of_tuples(dataset: Any) -> None:
    loader, infos = poisson(dataset, q=1e-7)
    x, y = next(iter(loader))
    assert torch.equal(x, torch.zeros(1, 2)) and torch.equal(y, torch.zeros(1, dtype=torch.int64))
    assert infos[0].mask is not None and infos[0].mask.tolist() == [False]


def test_structure_of_the_collated_batch_is_kept() -> None:
    Pair = namedtuple("Pair", "x y")

    def collate(records: list[Any]) -> Any:
        return Pair(torch.stack([x for x, _ in records]), {"y": (torch.tensor([y for _, y in records]), None)})

    for q, strict in ((0.3, False), (0.3, True), (1e-7, False)):
        batch = next(iter(poisson(Numbers(20), q=q, strict=strict, loader={"collate_fn": collate})[0]))
        assert type(batch) is Pair and type(batch.y["y"]) is tuple and batch.y["y"][1] is None
        assert batch.x.shape[0] == batch.y["y"][0].shape[0]


def test_strings_are_padded_with_empty_ones() -> None:
    loader, infos = poisson(Numbers(20, "text"), strict=True)
    x, text = next(iter(loader))
    assert infos[0].mask is not None
    expected = [f"r{int(v) - 1}" if here else "" for v, here in zip(x[:, 0], infos[0].mask, strict=True)]
    assert list(text) == expected and {t for t in text if t} == {f"r{i}" for i in loader.indices(0)}
    assert list(next(iter(poisson(Numbers(20, "text"), q=1e-7)[0]))[1]) == [""]


def test_leaves_that_cannot_be_padded() -> None:
    class Opaque:
        pass

    def collate(records: list[Any]) -> Any:
        return torch.stack([x for x, _ in records]), Opaque()

    assert isinstance(next(iter(poisson(Numbers(20), loader={"collate_fn": collate})[0]))[1], Opaque)
    for kwargs in ({"q": 1e-7}, {"strict": True}):
        with pytest.raises(WeightclipError, match=r"batch\[1\] is a Opaque"):
            next(iter(poisson(Numbers(20), loader={"collate_fn": collate}, **kwargs)[0]))


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda r: torch.stack([x for x, _ in r[1:]]), "must keep every record"),
        (lambda r: (torch.stack([x for x, _ in r]), torch.tensor(1.0)), r"batch\[1\] has shape \(\)"),
        (lambda r: torch.stack([x for x, _ in r], dim=1), "must keep every record"),
    ],
)
def test_collate_must_keep_records_on_dimension_zero(collate: Any, message: str) -> None:
    with pytest.raises(WeightclipError, match=message) as error:
        next(iter(poisson(Numbers(40), q=0.5, loader={"collate_fn": collate})[0]))
    assert "\n" not in str(error.value)


def test_data_set_that_stacks_by_itself() -> None:
    class Stacked(Numbers):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.tensor(indices)[:, None] + 1.0, torch.tensor(indices)

    loader, infos = poisson(Stacked(40), loader={"collate_fn": lambda batch: batch}, max_physical_batch_size=5)
    assert draws(loader, infos) == [loader.indices(t).tolist() for t in range(5)]


# The short cut --------------------------------------------------------------------------------------------------------


def test_short_cut_equals_default_collation() -> None:
    data = tensors(40)
    nested = Subset(Subset(data, list(range(39, -1, -1))), np.arange(-30, 0))  # type: ignore[arg-type]
    for dataset in (data, Subset(data, range(5, 35)), Subset(data, range(-20, 10)), nested):
        fast, _ = poisson(dataset)
        slow, _ = poisson(dataset, loader={"collate_fn": lambda r: torch.utils.data.default_collate(r)})
        assert fast._gather is not None and slow._gather is None
        for a, b in zip(fast, slow, strict=True):
            assert type(a) is type(b) is list
            assert all(torch.equal(u, v) and u.dtype == v.dtype for u, v in zip(a, b, strict=True))


def test_subclasses_keep_their_own_look_up() -> None:
    class Augmented(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return -x, y

    loader, _ = poisson(Augmented(*tensors(20).tensors))
    assert (next(iter(loader))[0] <= 0).all()


def test_rows_stay_on_their_device() -> None:
    data = TensorDataset(torch.empty(20, 3, device="meta"), torch.arange(20))
    loader, infos = poisson(data, max_physical_batch_size=25, strict=True)
    x, y = next(iter(loader))
    assert x.device.type == "meta" and x.shape == (25, 3) and y.device.type == "cpu"
    assert infos[0].mask is not None and infos[0].mask.device.type == "meta"


def test_nothing_of_the_user_is_changed() -> None:
    data = tensors(40)
    before = [t.clone() for t in data.tensors]
    user = DataLoader(data, batch_size=8, shuffle=True)
    known = dict(vars(user))
    state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    for q in (0.3, 1.0):
        for x, y in PoissonLoader(user, sample_rate=q, streams=Streams.secure(), on_batch=lambda info: None):
            x.zero_(), y.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, data.tensors, strict=True))
    assert vars(user) == known
    assert torch.equal(state[0], torch.get_rng_state())
    assert np.array_equal(state[1], np.random.get_state()[1])  # type: ignore[index]


def test_worker_settings_are_taken_over() -> None:
    def init(worker: int) -> None:
        pass

    settings_ = {"num_workers": 2, "prefetch_factor": 3, "timeout": 7, "worker_init_fn": init, "in_order": False}
    inner = poisson(Numbers(9), loader={**settings_, "persistent_workers": True})[0]._inner
    assert inner is not None and inner.persistent_workers and inner.in_order
    assert (inner.num_workers, inner.prefetch_factor, inner.timeout, inner.worker_init_fn) == (2, 3, 7, init)


# Memory-mapped arrays -------------------------------------------------------------------------------------------------


def test_memory_mapped_rows(tmp_path: Any) -> None:
    x, y = (t.numpy() for t in tensors(50).tensors)
    np.save(tmp_path / "x.npy", x.astype(">f4"))
    np.save(tmp_path / "y.npy", y)
    data = ArrayDataset(tmp_path / "x.npy", str(tmp_path / "y.npy"))
    assert len(data) == 50 and isinstance(data.arrays[0].base, np.memmap)
    row = data[7]
    assert torch.equal(row[0], torch.tensor([8.0, 8.0])) and row[1].shape == () and row[1] == 2
    expected = draws(*poisson(tensors(50)))
    for dataset, workers in ((data, 0), (data, 1), (ArrayDataset(x, y), 0)):
        loader, infos = poisson(dataset, loader={"num_workers": workers})
        assert (loader._gather is None) == bool(workers)
        assert draws(loader, infos) == expected
    for batch in poisson(data)[0]:
        batch[0].zero_()  # a copy: the file is mapped read-only
    assert np.array_equal(np.load(tmp_path / "x.npy"), x)


def test_pickled_map_is_a_path(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", np.ones((10_000, 4)))
    text = pickle.dumps(ArrayDataset(tmp_path / "x.npy"))
    assert len(text) < 1000
    assert torch.equal(pickle.loads(text)[9_999][0], torch.ones(4, dtype=torch.float64))


def test_array_errors(tmp_path: Any) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "many.npz", a=np.ones(3))
    for sources, message in (
        ((), "no arrays"),
        ((np.ones(3), np.ones(4)), r"\[3, 4\]"),
        ((np.array(1.0),), "number of rows"),
        ((tmp_path / "missing.npy",), "cannot map"),
        ((tmp_path / "objects.npy",), "cannot map"),
        ((tmp_path / "many.npz",), "not one .npy array"),
    ):
        with pytest.raises(WeightclipError, match=message):
            ArrayDataset(*sources)


# State, budget, misuse ------------------------------------------------------------------------------------------------


def test_resume_continues_the_draws() -> None:
    whole, infos = poisson(tensors(40))
    expected = draws(whole, infos) + draws(whole, infos)
    first, infos = poisson(tensors(40))
    draws(first, infos)
    resumed, infos = poisson(tensors(40))
    resumed.load_state_dict(first.state_dict())
    assert draws(resumed, infos) == expected[5:]
    with pytest.raises(WeightclipError, match="draws"):
        resumed.load_state_dict({"draws": -1})


def test_state_counts_complete_draws() -> None:
    loader, infos = poisson(tensors(60), max_physical_batch_size=4)
    for _ in loader:
        assert loader.draws == infos[-1].draw + 1
        assert loader.state_dict() == {"draws": infos[-1].draw + infos[-1].last}
    next(iter(loader))  # leaves draw 5 in the middle
    assert loader.state_dict() == {"draws": 5} and loader.draws == 6
    loader.draws = 9
    assert loader.state_dict() == {"draws": 9}


@pytest.mark.parametrize("dataset", [tensors(40), Numbers(40)], ids=["fast", "loader"])
def test_spent_budget_ends_the_pass_with_one_warning(dataset: Any) -> None:
    left = [3]
    loader, infos = poisson(dataset, steps_left=lambda: left[0])
    seen = 0
    with pytest.warns(UserWarning, match="privacy budget spent after 3 draws") as record:
        for _ in loader:
            seen += 1
            left[0] -= 1
    assert seen == len(infos) == 3 and len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(loader) == []
    assert len(infos) == loader.draws == 3


def test_budget_never_cuts_a_draw() -> None:
    left = [1]

    def seen(info: BatchInfo) -> None:
        left[0] = 0

    loader, _ = poisson(tensors(60), q=1.0, max_physical_batch_size=25, steps_left=lambda: left[0], on_batch=seen)
    assert [len(x) for x, _ in loader] == [25, 25, 10]


def test_information_comes_before_its_batch() -> None:
    loader, infos = poisson(Numbers(40), max_physical_batch_size=2)
    for count, batch in enumerate(loader, 1):
        assert len(infos) == count and infos[-1].rows == len(batch[0])
    assert all((a.draw, a.piece) < (b.draw, b.piece) for a, b in pairwise(infos))


def test_two_passes_at_once_are_refused() -> None:
    loader, _ = poisson(tensors(60), max_physical_batch_size=4)
    mid_draw = iter(loader)
    next(mid_draw)
    other = iter(loader)
    next(other)
    with pytest.raises(ContractError, match="leave one pass"):
        next(mid_draw)
    list(other)  # the one that began last goes on
    between = iter(loader)
    for _ in range(loader.pieces):
        next(between)
    next(iter(loader))
    with pytest.raises(ContractError, match="leave one pass"):
        next(between)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


class Unsized(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: tensors(9), "must be a torch.utils.data.DataLoader, got TensorDataset"),
        (lambda: DataLoader(Stream()), "IterableDataset"),
        (lambda: DataLoader(tensors(9), batch_size=None), "batch_size=None"),
        (lambda: DataLoader(tensors(9), sampler=SubsetRandomSampler(range(3))), "custom sampler"),
        (lambda: DataLoader(tensors(9), sampler=RandomSampler(range(9), replacement=True)), "custom sampler"),
        (lambda: DataLoader(tensors(9), sampler=SequentialSampler(range(3))), "custom sampler"),
        (
            lambda: DataLoader(tensors(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 2, False)),
            "custom batch_sampler",
        ),
        (lambda: DataLoader(tensors(0)), "empty"),
        (lambda: DataLoader(Unsized()), "no length"),
    ],
)
def test_loaders_that_cannot_be_sampled(loader: Any, message: str) -> None:
    with pytest.raises(WeightclipError, match=message) as error:
        PoissonLoader(loader(), sample_rate=0.5, streams=Streams.secure(), on_batch=lambda info: None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"q": 0.0}, r"sample_rate must lie in \(0, 1\], got 0.0"),
        ({"q": 1.5}, "sample_rate"),
        ({"q": -0.1}, "sample_rate"),
        ({"q": float("nan")}, "sample_rate"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size must be a positive integer"),
        ({"max_physical_batch_size": 2.5}, "max_physical_batch_size must be a positive integer"),
    ],
)
def test_options_out_of_range(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightclipError, match=message) as error:
        poisson(tensors(9), **kwargs)
    assert "\n" not in str(error.value)
