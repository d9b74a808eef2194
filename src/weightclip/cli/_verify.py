"""``weightclip verify``: epsilon from a ledger, a privacy report or a model folder alone, against what they claim."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightclip.errors import WeightclipError

if TYPE_CHECKING:
    from weightclip.accounting import Mechanism

_TOLERANCE = 1e-6  # of epsilon, relative


def verify(
    path: Annotated[
        Path, typer.Argument(metavar="LEDGER|REPORT|MODEL", help="ledger, privacy report (.json), or model folder")
    ],
    delta: Annotated[float | None, typer.Option(help="failure probability (default: the one recorded)")] = None,
    accountant: Annotated[
        str | None, typer.Option(help="pld or rdp (default: the model's own, pld for ledgers)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Recompute epsilon from the file alone; exit code 0 only if nothing was changed and claims are true.

    Example: weightclip verify run.ledger --delta 1e-5
    """
    if delta is not None and not 0 < delta < 1:
        raise typer.BadParameter("delta must lie strictly between 0 and 1", param_hint="--delta")
    if accountant not in (None, "pld", "rdp"):
        raise typer.BadParameter(f"must be pld or rdp, got {accountant}", param_hint="--accountant")
    if not path.exists():
        raise WeightclipError(f"{path} does not exist: give a ledger file, a privacy report or a model folder.")
    with _patience("recomputing epsilon"):
        reader = _model if path.is_dir() else _report if path.suffix == ".json" else _ledger
        result = reader(path, delta, accountant)
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['kind']:<11}{path}: {result['summary']}")
    for m in result["mechanisms"]:
        size = f"sigma {m['sigma']:.6g}" if m["sigma"] is not None else f"epsilon0 {m['epsilon0']:.6g}"
        print(f"{m['charges']:>10,} x {m['kind']}, {size}, q {m['q']:.6g}{', ' + m['label'] if m['label'] else ''}")
    shown = result["epsilon"] if isinstance(result["epsilon"], str) else f"{result['epsilon']:.6g}"
    print(f"epsilon    {shown} at delta {result['delta']:g} ({result['accountant']}, {result['adjacency']})")
    print("ok")


def _ledger(path: Path, delta: float | None, accountant: str | None) -> dict[str, Any]:
    from weightclip.accounting import read

    book = read(path)
    recorded = [run["public"]["delta"] for run in book.runs if run["public"].get("delta") is not None]
    if delta is None:
        if not recorded:
            raise typer.BadParameter("the ledger records no delta: give one", param_hint="--delta")
        delta = float(min(recorded))
    accountant = accountant or "pld"
    torn = f", {book.torn} of them for a torn last line" if book.torn else ""
    return {
        "kind": "ledger", "ok": True, "epsilon": _number(book.epsilon(delta, accountant)), "delta": delta,
        "accountant": accountant, "adjacency": book.adjacency.value, "charges": book.charges, "runs": len(book.runs),
        "torn": book.torn, "id": book.id, "head": book.head, "mechanisms": _rows(book.mechanisms()),
        "summary": f"{book.charges:,} charges in {len(book.runs)} run(s){torn}; no line changed; head {book.head}",
    }  # fmt: skip


def _report(path: Path, delta: float | None, accountant: str | None) -> dict[str, Any]:
    """The report of an engine, written by ``json.dump``: its epsilon, and what each mechanism costs alone."""
    from weightclip.accounting import Adjacency, epsilon
    from weightclip.engine import check_format
    from weightclip.sampling import TAIL
    from weightclip.tabular import mechanisms_of, strict_json

    try:
        report = strict_json(path.read_bytes())
        check_format(report)
        mechanisms, relation = mechanisms_of(report), Adjacency[report["adjacency"]]
        stated, by = float(report["delta"]), accountant or str(report["accountant"])
        draws = sum(m.steps for m in mechanisms)
        if "preprocessing" in report:
            raise WeightclipError(f"{path} is the report of an estimator: verify the model folder it belongs to.")
        search = report.get("search")
        found = _total(report, mechanisms, stated, report["accountant"])
        for m, entry in zip(mechanisms, report["mechanisms"], strict=True):
            alone = epsilon([m], stated - m.steps * TAIL, report["accountant"], relation)
            _agree(path, entry["epsilon"], alone, stated)
        claimed, listed = float(report["epsilon"]), report["public"]["steps"]
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightclipError(
            f"{path} is no complete privacy report ({type(error).__name__}: {error}): write engine.report(delta) to it."
        ) from error
    _agree(path, claimed, found, stated)
    if listed != draws and (search is None or listed > draws):  # runs of a search count as if they made all steps
        raise WeightclipError(f"{path} speaks of {listed} steps, but its mechanisms list {draws}.")
    at = stated if delta is None else delta
    by = by if search is None else "rdp"
    value = _total(report, mechanisms, at, by)
    said = f"claims epsilon {claimed:.6g} at delta {stated:g}, which is what its mechanisms cost"
    return _found(report, mechanisms, value, at, by) | {"kind": "report", "summary": said}


def _total(report: dict[str, Any], mechanisms: Sequence[Mechanism], delta: float, accountant: str) -> float:
    """Epsilon of everything an engine's report lists; of the whole search where there was one."""
    from weightclip.accounting import Adjacency, epsilon
    from weightclip.sampling import TAIL
    from weightclip.tabular import searched_epsilon

    if (search := report.get("search")) is not None:
        return searched_epsilon(mechanisms, delta, float(search["mean_runs"]), float(report["target_epsilon"]))
    draws = sum(m.steps for m in mechanisms)  # each costs TAIL of delta: SOUNDNESS Theorem 27
    return epsilon(mechanisms, delta - draws * TAIL, accountant, Adjacency[report["adjacency"]])


def _model(path: Path, delta: float | None, accountant: str | None) -> dict[str, Any]:
    from weightclip.accounting import epsilon
    from weightclip.search import network_card
    from weightclip.tabular import folder as _folder
    from weightclip.tabular import mechanisms_of, model_card, recompute

    if (path / "ledger.json").is_file() and not (path / _folder.CHECKSUMS).is_file():
        raise WeightclipError(f"{path} is a checkpoint of an engine: verify the ledger of its run instead.")
    if _folder.is_network(path):
        report = _folder.check_network(path)
        found = _report(path / _folder.PRIVACY, delta, accountant)
        if network_card(report).encode() != (path / _folder.CARD).read_bytes():
            raise WeightclipError(f"model {path}: its card does not say what its report says.")
        return {**found, "kind": "model", "summary": f"files unchanged; {found['summary']}"}
    _, pipeline, report = _folder.load(path)
    if "format" not in report:
        raise WeightclipError(f"model {path} was written by version 0.1, whose card is unknown here: use that version.")
    try:
        mechanisms = mechanisms_of(report)
        relation, stated, claimed = report["adjacency"].lower(), report["delta"], float(report["epsilon"])
        found = recompute(report)
        for m, entry in zip(mechanisms, report["mechanisms"], strict=True):
            _agree(path, entry["epsilon"], epsilon([m], stated, report["accountant"], relation), stated)
        if any(line.startswith("NOT PRIVATE") for line in report["preprocessing"]):
            found = math.inf  # statistics that were read without paying
        card = model_card(pipeline, report)
        statement = report["statement"]
    except WeightclipError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightclipError(
            f"model {path}: its privacy report is not complete ({type(error).__name__}: {error})."
        ) from error
    _agree(path, claimed, found, stated)
    said = f"({claimed:.4g}, {stated:g})-"
    if not statement.startswith(said) or card.encode() != (path / _folder.CARD).read_bytes():
        raise WeightclipError(f"model {path}: its statement or its card does not say what its report says.")
    by, at = accountant or str(report["accountant"]), float(stated) if delta is None else delta
    value = found if math.isinf(found) else recompute(report, at, by)
    said = f"files unchanged; claims epsilon {claimed:.6g} at delta {stated:g}, which is true"
    return _found(report, mechanisms, value, at, by) | {"kind": "model", "summary": said}


def _found(
    report: dict[str, Any], mechanisms: Sequence[Mechanism], epsilon: float, delta: float, accountant: str
) -> dict[str, Any]:
    """What is shown of a report that is true."""
    return {
        "ok": True, "epsilon": _number(epsilon), "delta": delta, "accountant": accountant,
        "adjacency": report["adjacency"].lower(), "charges": sum(m.steps for m in mechanisms),
        "claimed": report["epsilon"], "claimed_delta": float(report["delta"]), "mechanisms": _rows(mechanisms),
    }  # fmt: skip


def _agree(path: Path, claim: Any, found: float, delta: float) -> None:
    claimed = float(claim)
    if not math.isclose(found, claimed, rel_tol=_TOLERANCE):
        raise WeightclipError(
            f"{path} claims epsilon {claimed:.6g}, but its mechanisms amount to {found:.6g} at delta {delta:g}."
        )


def _rows(mechanisms: Sequence[Mechanism]) -> list[dict[str, Any]]:
    return [{"kind": m.kind, "sigma": m.sigma, "epsilon0": m.epsilon0, "q": m.q, "charges": m.steps, "label": m.label}
            for m in mechanisms]  # fmt: skip


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


@contextlib.contextmanager
def _patience(text: str) -> Iterator[None]:
    """Shows that something is going on, if it takes more than two seconds."""
    from rich.console import Console

    status = Console(stderr=True).status(text)
    timer = threading.Timer(2.0, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
