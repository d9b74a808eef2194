"""Image sets: parsers on small made files, where files are looked for, downloads, and the real data where present."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from weightclip.errors import WeightclipError
from weightclip_studies import data
from weightclip_studies.data import _fetch, _images

MNIST_TRAIN = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST_TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)


def idx(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return gzip.compress(header + array.tobytes())


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture
def accept(monkeypatch):
    """Makes given files the accepted ones: writes them and enters their checksums in the table."""
    table = {name: dict(files) for name, files in _images.checksums().items()}
    monkeypatch.setattr(_images, "checksums", lambda: table)
    monkeypatch.setattr(_fetch, "checksums", lambda: table)

    def write(name: str, folder: Path, files: dict[str, bytes]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
            table[name][file] = hashlib.sha256(content).hexdigest()

    return write


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No image data in any of the default places."""
    monkeypatch.delenv("WEIGHTCLIP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_images, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "e" / "_images.py"))


def idx_set(random, n: int) -> tuple[np.ndarray, np.ndarray, dict[str, bytes]]:
    images = random.integers(0, 256, (n, 28, 28), dtype=np.uint8)
    labels = random.integers(0, 10, n, dtype=np.uint8)
    files = {}
    for prefix in ("train", "t10k"):
        files[f"{prefix}-images-idx3-ubyte.gz"] = idx(images)
        files[f"{prefix}-labels-idx1-ubyte.gz"] = idx(labels)
    return images, labels, files


def cifar_records(images: np.ndarray, labels: np.ndarray) -> bytes:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([labels[:, None], planes], axis=1).astype(np.uint8).tobytes()


def cifar_images(random, n: int) -> tuple[np.ndarray, np.ndarray]:
    return random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), random.integers(0, 10, n, dtype=np.uint8)


def packed(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, content in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_idx_round_trip(random):
    for shape in ((7,), (3, 28, 28), (2, 4, 4, 3)):
        array = random.integers(0, 256, shape, dtype=np.uint8)
        assert np.array_equal(_images.parse_idx(idx(array)), array)


def test_broken_idx_is_refused(random):
    good = gzip.decompress(idx(random.integers(0, 256, (3, 5), dtype=np.uint8)))
    for bad in (b"", good[:-1], good + b"x", b"\x00\x00\x0d" + good[3:]):
        with pytest.raises(WeightclipError, match="idx"):
            _images.parse_idx(gzip.compress(bad))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_sets_are_read_from_a_folder(name, random, accept, tmp_path):
    images, labels, files = idx_set(random, 4)
    accept(name, tmp_path, files)
    for split in ("train", "test"):
        found = data.load_images(name, split, folder=tmp_path)
        assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)
        assert found[0].dtype == found[1].dtype == np.uint8


def test_places_are_tried_in_order(random, accept, nowhere, monkeypatch, tmp_path):
    """$WEIGHTCLIP_DATA/images/<name>, $WEIGHTCLIP_DATA/<name>, shared/data beside a checkout, then the cache."""
    checkout = tmp_path / "a"
    (checkout / "b").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    places = [
        tmp_path / "chosen" / "images" / "mnist",
        tmp_path / "chosen" / "mnist",
        tmp_path / "shared" / "data" / "images" / "mnist",
        tmp_path / "cache" / "weightclip" / "mnist",
    ]
    _, _, files = idx_set(random, 2)
    for place in places:
        accept("mnist", place, files)
    monkeypatch.setenv("WEIGHTCLIP_DATA", str(tmp_path / "chosen"))
    assert list(_images._places("mnist")) == places
    for place in places:  # take away the first place each time: the next one serves
        assert len(data.load_images("mnist", "train")[0]) == 2
        for file in files:
            (place / file).unlink()
    with pytest.raises(WeightclipError, match="not found"):
        data.load_images("mnist", "train")


def test_absent_data_unknown_names_and_parts_are_one_line_errors(nowhere, tmp_path):
    calls = (
        lambda: data.load_images("mnist", "train"),
        lambda: data.load_images("cifar10", "test", folder=tmp_path),
        lambda: data.load_images("imagenet", "train"),
        lambda: data.load_images("mnist", "validation"),
        lambda: data.fetch("imagenet"),
    )
    for call, part in zip(calls, ("fetch", "not found in", "cifar10, fashion", "split", "unknown"), strict=True):
        with pytest.raises(WeightclipError, match=part) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_changed_image_file_is_refused(random, accept, tmp_path):
    _, _, files = idx_set(random, 2)
    accept("mnist", tmp_path, files)
    name = "t10k-labels-idx1-ubyte.gz"
    (tmp_path / name).write_bytes(idx(np.zeros(2, dtype=np.uint8)))
    with pytest.raises(WeightclipError, match=f"{name} has SHA-256"):
        data.load_images("mnist", "test", folder=tmp_path)


def test_strips_are_lossless(random, accept, tmp_path, monkeypatch):
    pil = pytest.importorskip("PIL.Image", reason="WebP strips need Pillow")
    monkeypatch.setattr(_images, "_CIFAR_STRIPS", {"train": 3, "test": 1})
    images, labels = cifar_images(random, 15)
    files = {"train-labels-idx1-ubyte.gz": idx(labels)}
    for i in range(3):
        buffer = io.BytesIO()
        strip = images[5 * i : 5 * i + 5].reshape(5 * 32, 32, 3)
        pil.fromarray(strip).save(buffer, "WEBP", lossless=True, exact=True)
        files[f"train-{i:03d}.webp"] = buffer.getvalue()
    accept("cifar10", tmp_path, files)
    found = data.load_images("cifar10", "train", folder=tmp_path)
    assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)
    with pytest.raises(WeightclipError, match="not found"):
        data.load_images("cifar10", "test", folder=tmp_path)


@pytest.mark.parametrize("subfolder", ["", "cifar-10-batches-bin"])
def test_binary_batches(subfolder, random, accept, tmp_path):
    images, labels = cifar_images(random, 10)
    files = {f"data_batch_{i + 1}.bin": cifar_records(images[2 * i :][:2], labels[2 * i :][:2]) for i in range(5)}
    accept("cifar10", tmp_path / subfolder, files)
    found = data.load_images("cifar10", "train", folder=tmp_path)
    assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)


def test_archives(random, accept, tmp_path):
    images, labels = cifar_images(random, 3)
    records = cifar_records(images, labels)
    batch = {b"data": np.frombuffer(records, np.uint8).reshape(3, -1)[:, 1:], b"labels": labels.tolist()}
    archives = {
        "cifar-10-binary.tar.gz": packed({"cifar-10-batches-bin/test_batch.bin": records}),
        "cifar-10-python.tar.gz": packed({"cifar-10-batches-py/test_batch": pickle.dumps(batch)}),
    }
    for archive, content in archives.items():
        accept("cifar10", tmp_path / archive, {archive: content})
        found = data.load_images("cifar10", "test", folder=tmp_path / archive)
        assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)


def test_pickles_of_unknown_origin_are_never_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda *a, **k: pytest.fail("a pickle was opened before its checksum matched"))
    content = packed({"cifar-10-batches-py/test_batch": b"anything"})
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(content)
    with pytest.raises(WeightclipError, match="SHA-256"):
        data.load_images("cifar10", "test", folder=tmp_path)


def test_fetch_downloads_checks_and_keeps(random, accept, tmp_path, monkeypatch):
    images, _, files = idx_set(random, 2)
    accept("mnist", tmp_path / "source", files)
    sources = ((tmp_path / "gone").as_uri(), (tmp_path / "source").as_uri())  # the first source does not answer
    monkeypatch.setattr(_fetch, "_SOURCES", {"mnist": (tuple(files), sources)})
    folder = data.fetch("mnist", tmp_path / "dest", progress=False)
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    assert np.array_equal(data.load_images("mnist", "train", folder=folder)[0], images)
    monkeypatch.setattr(_fetch, "_download", lambda *a: pytest.fail("a right file was downloaded again"))
    assert data.fetch("mnist", tmp_path / "dest", progress=False) == folder


def test_fetch_never_leaves_a_wrong_file(random, accept, tmp_path, monkeypatch):
    _, _, files = idx_set(random, 2)
    accept("mnist", tmp_path / "source", files)
    first = next(iter(files))
    (tmp_path / "source" / first).write_bytes(b"not the file")
    monkeypatch.setattr(_fetch, "_SOURCES", {"mnist": ((first,), ((tmp_path / "source").as_uri(),))})
    with pytest.raises(WeightclipError, match="SHA-256") as caught:
        data.fetch("mnist", tmp_path / "dest", progress=False)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "dest").iterdir()) == []


def test_fetch_without_network_is_a_one_line_error(nowhere, tmp_path, monkeypatch):
    # Port 9 (discard) of this machine: the connection is refused at once.
    monkeypatch.setattr(_fetch, "_SOURCES", {"cifar10": (("cifar-10-binary.tar.gz",), ("http://127.0.0.1:9",))})
    with pytest.raises(WeightclipError, match="check the network") as caught:
        data.fetch("cifar10", progress=False)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "weightclip" / "cifar10").iterdir()) == []


def test_every_fetched_file_has_a_checksum():
    assert data.image_names() == ("cifar10", "fashion_mnist", "mnist")
    for name, (files, sources) in _fetch._SOURCES.items():
        assert set(files) <= set(_images.checksums()[name]) and sources


def real(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        return data.load_images(name, split)
    except WeightclipError as error:
        if "not found" not in str(error):
            raise
        pytest.skip(f"{name} is not on this machine")


@pytest.mark.parametrize(
    ("name", "split", "balance", "first"),
    [
        ("mnist", "train", MNIST_TRAIN, (5, 0, 4, 1, 9)),
        ("mnist", "test", MNIST_TEST, (7, 2, 1, 0, 4)),
        ("fashion_mnist", "train", (6000,) * 10, (9, 0, 0, 3, 0)),
        ("fashion_mnist", "test", (1000,) * 10, (9, 2, 1, 1, 6)),
    ],
)
def test_real_idx_sets(name, split, balance, first):
    images, labels = real(name, split)
    assert images.shape == (sum(balance), 28, 28) and images.dtype == np.uint8
    assert tuple(np.bincount(labels).tolist()) == balance
    assert tuple(labels[:5].tolist()) == first


def test_real_cifar10():
    pytest.importorskip("PIL", reason="WebP strips need Pillow")
    images, labels = real("cifar10", "test")
    assert images.shape == (10000, 32, 32, 3) and labels[0] == 3
    assert np.bincount(labels).tolist() == [1000] * 10
    # The strips hold exactly the records of the original binary batch, whose checksum is published.
    expected = _images.checksums()["cifar10"]["test_batch.bin"]
    assert hashlib.sha256(cifar_records(images, labels)).hexdigest() == expected
