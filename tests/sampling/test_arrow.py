"""Rows of Arrow files and of Hugging Face data sets: what a mapped source hands out, and what of it is read."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
from tests.sampling_kit import poisson
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from weightclip.engine import PrivacyEngine
from weightclip.errors import WeightclipError
from weightclip.noise import Streams
from weightclip.sampling import ArrowDataset, PoissonLoader, Share
from weightclip.sampling._datasets import gatherer

pa = pytest.importorskip("pyarrow", reason="needs the extra 'table'")
feather = pytest.importorskip("pyarrow.feather")
parquet = pytest.importorskip("pyarrow.parquet")
N = 97
RNG = np.random.default_rng(0)
A, B, V = RNG.normal(size=N).astype(np.float32), RNG.integers(0, 9, N), RNG.normal(size=(N, 3)).astype(np.float32)
Y = RNG.integers(0, 2, N)


def table():
    lists = pa.FixedSizeListArray.from_arrays(pa.array(V.ravel()), 3)
    return pa.table({"a": A, "b": B, "v": lists, "y": Y, "flag": Y == 1, "name": [str(i) for i in range(N)]})


@pytest.fixture
def path(tmp_path):
    """A file of several batches, of which the last is shorter."""
    with pa.ipc.new_file(tmp_path / "t.arrow", table().schema) as sink:
        for batch in table().to_batches(max_chunksize=20):
            sink.write_batch(batch)
    return tmp_path / "t.arrow"


def test_rows_are_those_of_the_table(path):
    data = ArrowDataset(path, ["a", "b"], "v", "y", "flag")
    assert len(data) == N and all(t.dtype == d for t, d in zip(data[0], (torch.float32, torch.float32), strict=False))
    wanted = np.array([96, 0, 19, 20, 20, 55])
    x, v, y, flag = data.rows(wanted)
    assert np.array_equal(x, np.stack([A, B.astype(np.float32)], 1)[wanted]) and np.array_equal(v, V[wanted])
    assert np.array_equal(y, Y[wanted]) and np.array_equal(flag, Y[wanted] == 1)
    for one, many in zip(data[-1], data.__getitems__([96])[0], strict=True):
        assert torch.equal(one, many)
    with pytest.raises(IndexError):
        data[N]


def test_missing_values_are_zero(tmp_path):
    lists = pa.array([[1.0, 2.0], None, [None, 4.0]], pa.list_(pa.float64(), 2))
    some = pa.table({"a": pa.array([1, None, 3]), "v": lists, "f": pa.array([True, None, False])})
    feather.write_feather(some, tmp_path / "t.feather", compression="uncompressed")
    a, v, f = ArrowDataset(tmp_path / "t.feather", "a", "v", "f").rows(np.array([0, 1, 2]))
    assert a.tolist() == [1, 0, 3] and v.tolist() == [[1, 2], [0, 0], [0, 4]] and f.tolist() == [True, False, False]


def test_it_is_pickled_as_a_path(path):
    data = ArrowDataset(path, ["a"], "y")
    text = pickle.dumps(data)
    assert len(text) < 500 and all(torch.equal(p, q) for p, q in zip(pickle.loads(text)[7], data[7], strict=True))


def test_only_rows_that_are_asked_for_are_copied(path):
    before = pa.total_allocated_bytes()
    data = ArrowDataset(path, ["a"], "v")
    data.rows(np.array([3, 50]))
    assert pa.total_allocated_bytes() - before < 1000


def test_parquet_is_written_once(tmp_path):
    parquet.write_table(table(), tmp_path / "t.parquet", row_group_size=30)
    data = ArrowDataset.from_parquet(tmp_path / "t.parquet", tmp_path / "t.arrow", ["a", "b"], "y")
    assert np.array_equal(data.rows(np.arange(N))[1], Y) and sorted(p.name for p in tmp_path.iterdir())[0] == "t.arrow"
    assert (tmp_path / "t.arrow").stat().st_mode & 0o777 == 0o600 and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(WeightclipError, match="from_parquet"):
        ArrowDataset(tmp_path / "t.parquet", "a")
    with pytest.raises(WeightclipError, match="no column 'z'"):
        ArrowDataset.from_parquet(tmp_path / "t.parquet", tmp_path / "z.arrow", "z")


def test_files_that_cannot_be_mapped_are_refused_in_one_line(path, tmp_path):
    feather.write_feather(table(), tmp_path / "t.feather", compression="lz4")
    (tmp_path / "other.arrow").write_bytes(b"something else")
    for arguments, said in (
        ((path,), "at least one column"), ((path, "z"), "no column 'z'"), ((path, "name"), "only numbers"),
        ((path, ["a", "v"]), "only numbers"), ((tmp_path / "t.feather", "a"), "is compressed"),
        ((tmp_path / "other.arrow", "a"), "cannot map"), ((tmp_path / "none.arrow", "a"), "cannot map"),
    ):  # fmt: skip
        with pytest.raises(WeightclipError, match=said) as caught:
            ArrowDataset(*arguments)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_same_records_in_memory(path, workers):
    mapped, _ = poisson(ArrowDataset(path, "v", "y"), loader={"num_workers": workers})
    held, _ = poisson(TensorDataset(torch.from_numpy(V), torch.from_numpy(Y)))
    assert gatherer(ArrowDataset(path, "y")) is not None
    for one, other in zip(mapped, held, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


class Spied(Dataset):
    """Remembers which records were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor([float(index + 1)])  # a zero is never a record


@pytest.mark.parametrize("size", [None, 5])
def test_a_rank_reads_the_records_of_its_own_pieces_alone(size):
    read = []
    for rank in range(3):
        data = Spied()
        loader = PoissonLoader(
            DataLoader(data, batch_size=20), sample_rate=None, streams=Streams.seeded(1), on_batch=lambda info: None,
            share=Share(rank, 3), max_physical_batch_size=size,
        )  # fmt: skip
        iterator, ours = iter(loader), []
        for _ in range(loader.pieces):
            ours += next(iterator).flatten().tolist()
        read.append([i for i in data.read if float(i + 1) in ours])
        assert set(data.read) <= {0, *read[-1]}  # record 0 gives an empty piece its shape
    drawn = loader.indices(0).tolist()
    assert sorted(i for part in read for i in part) == drawn


def trained(data) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model, optimizer, loader, loss = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=20), criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    for batch in loader:
        x, y = (batch["v"], batch["y"]) if isinstance(batch, dict) else batch
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.weight.detach()


def test_training_on_a_file_is_training_on_its_records(path):
    held = trained(TensorDataset(torch.from_numpy(V), torch.from_numpy(Y)))
    assert torch.equal(trained(ArrowDataset(path, "v", "y")), held)


def test_hugging_face_data_sets_are_sources_as_they_are(path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    data = datasets.Dataset(datasets.table.MemoryMappedTable.from_file(str(streamed(path))))
    data = data.with_format("torch", columns=["v", "y"])
    loader, _ = poisson(data, loader={"num_workers": 0})
    read: list[int] = []
    monkeypatch.setattr(type(data), "__getitems__", spy(type(data).__getitems__, read))
    for t, batch in enumerate(loader):
        drawn = loader.indices(t)
        assert np.array_equal(batch["y"], Y[drawn]) and np.array_equal(batch["v"], V[drawn])
    assert len(read) == sum(loader.indices(t).size for t in range(len(loader)))


def spy(real, read):
    def getitems(self, keys):
        read.extend(keys)
        return real(self, keys)

    return getitems


def streamed(path):
    """The same table as an Arrow stream, which is how Hugging Face keeps it."""
    with pa.ipc.new_stream(path.with_name("s.arrow"), table().schema) as sink:
        sink.write_table(table())
    return path.with_name("s.arrow")


def test_calls_at_once_do_not_touch_each_others_files(tmp_path, monkeypatch):
    parquet.write_table(pa.table({"a": [1.0, 2.0]}), tmp_path / "t.parquet")
    target, replace = tmp_path / "t.arrow", os.replace

    def another_call_comes_first(source, place):
        monkeypatch.setattr(os, "replace", replace)
        assert len(ArrowDataset.from_parquet(tmp_path / "t.parquet", target, "a")) == 2
        replace(source, place)

    monkeypatch.setattr(os, "replace", another_call_comes_first)
    assert len(ArrowDataset.from_parquet(tmp_path / "t.parquet", target, "a")) == 2
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.arrow", "t.parquet"]
