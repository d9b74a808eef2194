"""The ledger's file: lines that map one to one to dp-accounting's events, a chain that shows changes, torn ends."""

from __future__ import annotations

import json
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger_kit import book_of, charges, killed, started, steps

import weightclip as wc
from weightclip.accounting._accounting import Mechanism, epsilon
from weightclip.accounting._ledger_format import chained, decode, encode, from_event, parse, read, to_event

POSITIVE = st.floats(1e-300, 1e300)


@given(q=st.floats(1e-300, 1.0), size=POSITIVE, pure=st.booleans())
def test_events_map_one_to_one(q: float, size: float, pure: bool) -> None:
    m = Mechanism("pure", None, q, 1, size) if pure else Mechanism("gaussian", size, q, 1)
    event = decode(json.loads(json.dumps(encode(to_event(m)))))
    assert event == to_event(m) and from_event(event) == m
    assert isinstance(event, dp_accounting.PoissonSampledDpEvent) and event.sampling_probability == q


def test_events_are_what_dp_accounting_says_they_are() -> None:
    assert to_event(Mechanism("gaussian", 1.5, 0.25, 7)) == dp_accounting.PoissonSampledDpEvent(
        0.25, dp_accounting.GaussianDpEvent(1.5)
    )
    assert from_event(dp_accounting.GaussianDpEvent(2.0)) == Mechanism("gaussian", 2.0, 1.0, 1)
    for other in (dp_accounting.LaplaceDpEvent(1.0), dp_accounting.ZCDpEvent(0.1)):
        with pytest.raises(wc.WeightclipError, match="Gaussian and pure"):
            from_event(other)


def test_every_charge_has_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    run = started(path)
    steps(run, 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["weightclip_ledger"] == 1 and lines[0]["adjacency"] == "add_or_remove_one"
    assert lines[1]["public"]["expected_batch_size"] == 6 and lines[1]["block"] == 1
    assert [line["charge"] for line in lines[2:]] == [0, 1, 2]
    event = dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(1.0))
    assert all(decode(line["event"]) == event for line in lines[2:])


def test_different_runs_compose_as_dp_accounting_composes_them(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    accountant, delta = PLDAccountant(value_discretization_interval=2e-3), 1e-5
    for sigma, q, count in ((1.0, 0.25, 3), (2.0, 0.5, 2), (1.0, 0.25, 1)):
        run = started(path, sigma=sigma, sample_rate=q, accountant="pld")
        steps(run, count)
        killed(run)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), count)
    assert [(m.sigma, m.q, m.steps) for m in run.engine.mechanisms()] == [(1.0, 0.25, 4), (2.0, 0.5, 2)]
    direct = accountant.get_epsilon(delta)
    assert run.engine.get_epsilon(delta) == read(path).epsilon(delta) == pytest.approx(direct, rel=2e-3)
    # the lines themselves, by dp-accounting alone
    again = PLDAccountant(value_discretization_interval=2e-3)
    for line in map(json.loads, path.read_text().splitlines()):
        if "charge" in line:
            again.compose(decode(line["event"]), line["count"])
    assert again.get_epsilon(delta) == pytest.approx(direct, rel=1e-9)


def test_pure_mechanisms_compose_too(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    run = started(path, sigma=4.0, mechanism=wc.KNorm(1), accountant="pld")
    steps(run, 3)
    plain = [Mechanism("pure", None, 0.25, 3, 0.25)]
    assert run.engine.get_epsilon(1e-5) == read(path).epsilon(1e-5) == epsilon(plain, 1e-5)


def two_runs(path: Path) -> bytes:
    for sigma in (1.0, 2.0):
        run = started(path, sigma=sigma)
        steps(run, 3)
        killed(run)
    return path.read_bytes()


def test_nothing_can_be_changed_removed_or_moved(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    data = two_runs(path)
    lines = data.splitlines(keepends=True)
    assert len(lines) == 9
    damaged = [b"".join(lines[:i] + lines[i + 1 :]) for i in range(len(lines) - 1)]  # one removed
    damaged += [b"".join(lines[:i] + [lines[i]] + lines[i:]) for i in range(len(lines))]  # one twice
    damaged += [b"".join([*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]]) for i in range(len(lines) - 1)]
    damaged += [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data) - 1)]  # one bit, anywhere
    damaged += [
        data.replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0'),
        data.replace(b'"tail":1', b'"tail":0'),
    ]
    damaged += [b"\n" + data, data + b"\n", b"{}\n" + data, data.replace(b"\n", b"\r\n")]
    for number, text in enumerate(damaged):
        path.write_bytes(text)
        for look in (read, lambda p: wc.PrivacyEngine(ledger=p))[: 1 if number % 20 else 2]:
            with pytest.raises(wc.WeightclipError, match="ledger") as error:
                look(path)
            assert "\n" not in str(error.value)
        assert path.read_bytes() == text  # and nothing was repaired on the way


def test_a_last_line_changed_is_no_torn_line(tmp_path: Path) -> None:
    data = two_runs(tmp_path / "run.ledger")
    with pytest.raises(wc.WeightclipError, match="line 9 was changed"):
        parse(data[:-3] + b"0" + data[-2:], "it")


@pytest.mark.parametrize("block", [1, 4])
def test_cut_at_any_byte_a_ledger_never_counts_fewer_than_its_whole_lines(tmp_path: Path, block: int) -> None:
    path = tmp_path / "run.ledger"
    for sigma, count in ((1.0, 2 * block), (2.0, block)):
        run = started(path, sigma=sigma, block=block)
        steps(run, count)
        killed(run)
    data = path.read_bytes()
    whole, n = 0, 0  # charges in whole lines; lines so far
    ends = {}
    for line in data.splitlines(keepends=True):
        n += len(line)
        whole += json.loads(line).get("count", 0)
        ends[n] = whole
    known = 0
    for cut in range(len(data) + 1):
        known = ends.get(cut, known)
        at_end = cut in ends or cut == 0
        first_run = data.index(b"\n", data.index(b'{"run"')) + 1
        found = parse(data[:cut], "it")
        counted = 0 if found is None else found.charges
        torn = data[:cut].rpartition(b"\n")[2]
        nothing = at_end or cut < first_run or torn.startswith(b'{"run"')  # runs that were not entered charge nothing
        assert counted == known + (0 if nothing else block)
        if cut % 7 and not at_end:
            continue
        path.write_bytes(data[:cut])  # an engine repairs it, and counts the same for good
        engine = wc.PrivacyEngine(ledger=path)
        assert engine.steps == counted
        engine.ledger.close()
        again = parse(path.read_bytes(), "it")
        assert (0 if again is None else again.charges) == counted and (again is None or again.torn == 0)


def test_zeros_left_by_a_crash_are_a_torn_line(tmp_path: Path) -> None:
    data = two_runs(tmp_path / "run.ledger")
    for tail in (b"\0" * 300, b"\0" * 40 + data[-30:], b'{"charge":6' + b"\0" * 9 + b"\n"):
        book = book_of(data + tail)
        assert book.charges == 7 and book.torn == 1
    assert parse(b"\0" * 100, "it") is None


def test_lines_of_another_ledger_do_not_fit(tmp_path: Path) -> None:
    mine, other = two_runs(tmp_path / "a"), two_runs(tmp_path / "b")
    cut = mine.index(b"\n") + 1
    with pytest.raises(wc.WeightclipError, match="line 2"):
        parse(mine[:cut] + other[other.index(b"\n") + 1 :], "it")


def test_a_chain_that_holds_with_contents_that_do_not(tmp_path: Path) -> None:
    """Whoever writes a new file can chain anything: contents that make no sense are refused all the same."""
    event = encode(to_event(Mechanism("gaussian", 1.0, 0.5, 1)))
    header = {"weightclip_ledger": 1, "id": "0", "adjacency": "add_or_remove_one"}
    run = {"run": "0", "block": 1, "event": event, "label": "", "tail": 0.0, "public": {}}
    charge = {"charge": 0, "count": 1, "event": event}
    cases = [
        [{**header, "weightclip_ledger": 2}], [{**header, "adjacency": "none"}], [header, charge],
        [header, {**run, "block": 0}], [header, {**run, "tail": -1.0}], [header, {"run": "0"}],
        [header, run, {**charge, "charge": 1}], [header, run, {**charge, "count": 0}],
        [header, run, {**charge, "count": -1}], [header, run, {**charge, "count": 0.5}],
        [header, run, {**charge, "event": encode(to_event(Mechanism("gaussian", 9.0, 0.5, 1)))}],
        [header, {**run, "event": {"class": "NoOpDpEvent"}}], [header, run, {}],
    ]  # fmt: skip
    for lines in cases:
        data, head = b"", ""
        for line in lines:
            text, head = chained(line, head)
            data += text
        with pytest.raises(wc.WeightclipError, match="cannot be read") as error:
            parse(data, "it")
        assert "\n" not in str(error.value)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for text in ("my notes", "my notes\nand more\n", "{}\n", '{"charge":0}\n'):
        path.write_text(text)
        with pytest.raises(wc.WeightclipError, match="not a weightclip ledger"):
            wc.PrivacyEngine(ledger=path)
        assert path.read_text() == text
    for bad in (tmp_path, tmp_path / "none" / "run.ledger"):
        with pytest.raises(wc.WeightclipError, match="cannot use the ledger"):
            wc.PrivacyEngine(ledger=bad)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(wc.WeightclipError, match="cannot read the ledger"):
            read(missing)


def test_a_file_without_a_whole_header_is_a_new_ledger(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    for text in (b"", b"{", b'{"weightclip_ledger":1,"id":"ab'):
        path.write_bytes(text)
        with pytest.raises(wc.WeightclipError, match="empty"):
            read(path)
        run = started(path)
        steps(run, 1)
        killed(run)
        assert charges(path) == 1
