from __future__ import annotations

import pickle
import tracemalloc
import warnings
from collections import namedtuple
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
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

from weightclip._streams import Streams
from weightclip.errors import ContractError, WeightclipError
from weightclip.sampling import ArrayDataset, BatchInfo, PoissonLoader, poisson_indices


class Spy(Streams):
    """Remembers which streams were asked for."""

    asked: list[tuple[Any, ...]]

    def numpy(self, label: str, *ints: int) -> np.random.Generator:
        self.asked.append((label, *ints))
        return super().numpy(label, *ints)


class Numbers(Dataset):
    """Record i is (i + 1, label), so that a zero is never a record."""

    def __init__(self, n: int, form: str = "tuple") -> None:
        self.n, self.form = n, form

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        x, y = torch.full((2,), float(i + 1)), i % 3 + 1
        return {
            "tuple": (x, y),
            "dict": {"x": x, "more": (y, {"z": x.double()})},
            "text": (x, f"r{i}"),
        }[self.form]


def tensors(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(1.0, n + 1)[:, None].repeat(1, 2), torch.arange(n) % 3 + 1)


def poisson(dataset: Any, *, q: float | None = 0.2, seed: int = 0, loader: dict[str, Any] | None = None, **kwargs: Any):
    """A loader and the list its BatchInfos go to."""
    infos: list[BatchInfo] = []
    kwargs = {"streams": Streams.seeded(seed), "on_batch": infos.append, **kwargs}
    return PoissonLoader(DataLoader(dataset, **{"batch_size": 4, **(loader or {})}), sample_rate=q, **kwargs), infos


def numbers(batch: Any) -> list[int]:
    x = batch["x"] if isinstance(batch, dict) else batch[0]
    return (x[:, 0] - 1).int().tolist()


def draws(loader: PoissonLoader, infos: list[BatchInfo]) -> list[list[int]]:
    """The real record numbers of each draw of one pass."""
    out: list[list[int]] = []
    infos.clear()
    for batch in loader:
        info = infos[-1]
        got = numbers(batch)
        assert len(got) == info.rows
        real = info.rows if info.mask is None else int(info.mask.sum())
        if info.piece == 0:
            out.append([])
        out[-1] += got[:real]
        assert all(v == -1 for v in got[real:])
    return out


# The law of the draws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.01, 0.2, 0.4, 0.5, 0.7, 0.97])
def test_inclusions_are_independent_bernoulli(q: float) -> None:
    n, trials = 24, 6000
    included = np.zeros((trials, n))
    for t in range(trials):
        included[t, poisson_indices(np.random.default_rng([7, t]), q, n)] = 1
    # Each index on its own: a sum of n squared z-scores.
    z = (included.sum(0) - trials * q) / np.sqrt(trials * q * (1 - q))
    assert stats.chi2.sf((z**2).sum(), n) > 1e-4
    # Each pair: the centred products are uncorrelated over pairs, with variance (q(1-q))^2.
    c = included - q
    pairs = (c.T @ c)[np.triu_indices(n, 1)] / (np.sqrt(trials) * q * (1 - q))
    assert stats.chi2.sf((pairs**2).sum(), pairs.size) > 1e-4
    # The size of the draw.
    size = included.sum(1)
    assert stats.kstest(size + np.random.default_rng(0).random(trials), _smooth_binomial(n, q)).pvalue > 1e-4


def _smooth_binomial(n: int, q: float):
    def cdf(x: np.ndarray) -> np.ndarray:
        k = np.floor(x)
        return stats.binom.cdf(k - 1, n, q) + (x - k) * stats.binom.pmf(k, n, q)

    return cdf


@pytest.mark.parametrize("q", [1e-9, 1e-5])
def test_small_rates_have_the_right_gaps(q: float) -> None:
    gaps = np.concatenate(
        [np.diff(poisson_indices(np.random.default_rng([3, t]), q, int(2000 / q)), prepend=-1) for t in range(10)]
    )
    assert stats.kstest(gaps * -np.log1p(-q), "expon").pvalue > 1e-4
    # The low bits are uniform: a gap read off a double would repeat them.
    low = np.bincount(gaps % 16, minlength=16)
    assert stats.chisquare(low).pvalue > 1e-4


@pytest.mark.parametrize("q", [5e-324, 1e-300, 1e-17])
def test_vanishing_rates_draw_nothing(q: float) -> None:
    assert all(poisson_indices(np.random.default_rng(t), q, 2**40).size == 0 for t in range(20))


def test_rates_near_one_leave_out_the_right_share() -> None:
    q, n = 1 - 1e-4, 200_000
    missing = [n - poisson_indices(np.random.default_rng([5, t]), q, n).size for t in range(40)]
    assert stats.binomtest(sum(missing), 40 * n, 1e-4).pvalue > 1e-4
    assert poisson_indices(np.random.default_rng(0), 1 - 2**-53, 1000).tolist() == list(range(1000))


@given(st.floats(1e-6, 1, exclude_max=True), st.integers(1, 3000), st.integers(0, 50_000), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_longer_data_set_extends_the_draw(q: float, m: int, extra: int, seed: int) -> None:
    short = poisson_indices(np.random.default_rng(seed), q, m)
    long = poisson_indices(np.random.default_rng(seed), q, m + extra)
    assert np.array_equal(short, long[long < m])
    assert (np.diff(long) > 0).all() and (long.size == 0 or 0 <= long[0] <= long[-1] < m + extra)


@pytest.mark.parametrize("q", [0.05, 0.3, 0.45, 0.6, 0.9])
def test_the_draw_is_extended_across_chunks(q: float) -> None:
    long = poisson_indices(np.random.default_rng(1), q, 200_000)
    for m in (1, 300, 700, 1000, 1500, 5000, 20_000, 90_000):
        assert np.array_equal(poisson_indices(np.random.default_rng(1), q, m), long[long < m])


def test_no_memory_in_the_number_of_rows() -> None:
    tracemalloc.start()
    loader, _ = poisson(Numbers(10**8), q=1e-5, loader={"shuffle": True})
    sizes = [loader.indices(t).size for t in range(5)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(800 < s < 1200 for s in sizes)
    assert peak < 1_000_000  # one bit per row would be 12.5 MB


# Passes and pieces ----------------------------------------------------------------------------------------------------


def test_draw_depends_on_seed_and_number_alone() -> None:
    small, small_infos = poisson(tensors(30))
    large, large_infos = poisson(tensors(50))
    first = draws(small, small_infos)
    assert len(small) == len(first) == 5
    assert first == [[i for i in d if i < 30] for d in draws(large, large_infos)]
    assert first != draws(*poisson(tensors(30), seed=1))
    streams = Spy.seeded(0)
    assert isinstance(streams, Spy)
    streams.asked = []
    loader, infos = poisson(tensors(30), streams=streams)
    draws(loader, infos)
    assert streams.asked == [("sampling", t) for t in range(5)]
    assert draws(loader, infos) != first and loader.draws == 10
    assert [i.draw for i in infos] == list(range(5, 10))


@pytest.mark.parametrize("extra", [{}, {"max_physical_batch_size": 3}, {"pad_to": 3}])
def test_workers_change_nothing(extra: dict[str, int]) -> None:
    expected = draws(*poisson(tensors(40), **extra))
    assert draws(*poisson(Numbers(40), **extra)) == expected
    loader, infos = poisson(Numbers(40), loader={"num_workers": 2, "persistent_workers": True}, **extra)
    assert draws(loader, infos) == expected
    second = draws(loader, infos)
    fast, fast_infos = poisson(tensors(40), **extra)
    fast.load_state_dict({"draws": 5})
    assert second == draws(fast, fast_infos)


def test_leaving_a_pass_with_workers_loses_no_draw() -> None:
    loader, infos = poisson(Numbers(40), loader={"num_workers": 1, "persistent_workers": True})
    for _ in loader:
        break
    assert loader.draws == 1  # the workers are further ahead
    draws(loader, infos)
    assert [i.draw for i in infos] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dataset", [tensors(60), Numbers(60)], ids=["fast", "loader"])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_pieces_cover_the_draw_in_order(dataset: Any, size: int) -> None:
    loader, infos = poisson(dataset, max_physical_batch_size=size)
    for t, got in enumerate(draws(loader, infos)):
        assert got == loader.indices(t).tolist()
        pieces = [i for i in infos if i.draw == t]
        assert [p.piece for p in pieces] == list(range(len(pieces)))
        assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(p.rows == size for p in pieces[:-1]) and 1 <= pieces[-1].rows <= size
        assert all(p.mask is None for p in pieces) or not got


@pytest.mark.parametrize("dataset", [tensors(7), Numbers(7)], ids=["fast", "loader"])
@pytest.mark.parametrize("size", [None, 3, 7])
def test_rate_one_yields_every_record_once_in_order(dataset: Any, size: int | None) -> None:
    for q, batch_size in ((1.0, 2), (None, 7), (None, 50)):
        loader, infos = poisson(dataset, q=q, loader={"batch_size": batch_size}, max_physical_batch_size=size)
        assert len(loader) == 1 and loader.sample_rate == 1.0
        assert draws(loader, infos) == [list(range(7))]
        assert [i.rows for i in infos] == ([3, 3, 1] if size == 3 else [7])
        assert draws(loader, infos) == [list(range(7))] and infos[-1].draw == 1


@pytest.mark.parametrize(("q", "passes"), [(0.3, 3), (0.7, 1), (0.04, 25), (None, 6)])
def test_length_of_a_pass(q: float | None, passes: int) -> None:
    loader, _ = poisson(tensors(25), q=q)  # None: 4 / 25
    assert len(loader) == passes == sum(1 for _ in loader)
    assert loader.expected_batch == pytest.approx(25 * (q or 0.16))


@pytest.mark.parametrize("dataset", [tensors(60), Numbers(60), Numbers(60, "dict")], ids=["fast", "loader", "dict"])
def test_padding_gives_fixed_shapes(dataset: Any) -> None:
    loader, infos = poisson(dataset, pad_to=8)
    for t, got in enumerate(draws(loader, infos)):
        assert got == loader.indices(t).tolist()
        for p in (i for i in infos if i.draw == t):
            real = min(8, len(got) - 8 * p.piece)
            assert p.rows == 8
            if real == 8:
                assert p.mask is None
            else:
                assert p.mask is not None and p.mask.dtype == torch.bool
                assert p.mask.tolist() == [True] * real + [False] * (8 - real)
    assert any(i.mask is not None for i in infos) and any(not i.last for i in infos)


# Empty draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("pad_to", [None, 3])
def test_empty_draw_is_a_zero_record(workers: int, pad_to: int | None) -> None:
    rows = pad_to or 1
    loader, infos = poisson(Numbers(9, "dict"), q=1e-7, pad_to=pad_to, loader={"num_workers": workers})
    batch = next(iter(loader))
    (info,) = infos
    assert (info.draw, info.piece, info.last, info.rows) == (0, 0, True, rows)
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

    for q, pad_to in ((0.3, None), (0.3, 30), (1e-7, None)):
        batch = next(iter(poisson(Numbers(20), q=q, pad_to=pad_to, loader={"collate_fn": collate})[0]))
        assert type(batch) is Pair and type(batch.y["y"]) is tuple and batch.y["y"][1] is None
        assert batch.x.shape[0] == batch.y["y"][0].shape[0]


def test_strings_are_padded_with_empty_ones() -> None:
    loader, _ = poisson(Numbers(20, "text"), pad_to=30)
    _, text = next(iter(loader))
    real = loader.indices(0).tolist()
    assert list(text) == [f"r{i}" for i in real] + [""] * (30 - len(real))
    assert list(next(iter(poisson(Numbers(20, "text"), q=1e-7)[0]))[1]) == [""]


def test_leaves_that_cannot_be_padded() -> None:
    class Opaque:
        pass

    def collate(records: list[Any]) -> Any:
        return torch.stack([x for x, _ in records]), Opaque()

    assert isinstance(next(iter(poisson(Numbers(20), loader={"collate_fn": collate})[0]))[1], Opaque)
    for kwargs in ({"q": 1e-7}, {"pad_to": 30}):
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

    loader, infos = poisson(Stacked(40), loader={"collate_fn": lambda batch: batch}, pad_to=5)
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
    loader, infos = poisson(data, pad_to=25)
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
    loader.draws = 40
    with pytest.raises(ContractError, match="leave one pass"):
        list(other)


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
        ({"pad_to": 2.5}, "pad_to must be a positive integer"),
        ({"pad_to": 4, "max_physical_batch_size": 8}, "drop max_physical_batch_size=8"),
    ],
)
def test_options_out_of_range(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightclipError, match=message) as error:
        poisson(tensors(9), **kwargs)
    assert "\n" not in str(error.value)
