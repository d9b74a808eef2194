"""Hostile tables."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

from tests.hostile.kit import SECRET, TABLE, Case, train

GOOD = TABLE.encode()
HALF = len(GOOD) // 2

TABLES: tuple[tuple[str, str, bytes, str], ...] = (
    # what is wrong, name of the file, its contents, what the line must hold
    ("empty", "t.csv", b"", "is empty"),
    ("only a mark", "t.csv", b"\xef\xbb\xbf", "is empty"),
    ("only line ends", "t.csv", b"\n\n\n", "is empty"),
    ("a header only", "t.csv", b"a,b,label\n", "no rows"),
    ("a header and blank lines", "t.csv", b"a,b,label\n\n\n", "no rows"),
    ("only the target", "t.csv", b"label\nyes\nno\n", "no columns are left"),
    ("no header", "t.csv", f"1,{SECRET},yes\n2,b,no\n".encode(), "no column 'label'"),
    ("no header, twice the same", "t.csv", f"1,{SECRET},{SECRET}\n".encode(), "twice"),
    ("a name twice", "t.csv", b"a,a,label\n1,2,yes\n", "twice"),
    ("two empty names", "t.csv", b",,label\n1,2,yes\n", "twice"),
    ("a row too long", "t.csv", GOOD + f"1,{SECRET},yes,more\n".encode(), "row 122 has 4 fields"),
    ("a row too short", "t.csv", GOOD + f"{SECRET}\n".encode(), "row 122 has 1 fields"),
    ("a quote without end", "t.csv", GOOD + b'"' + SECRET.encode() + b"\n", "fields"),
    ("tabs in a csv", "t.csv", GOOD.replace(b",", b"\t"), "no column 'label'"),
    ("commas in a tsv", "t.tsv", GOOD, "no column 'label'"),
    ("Latin-1", "t.csv", GOOD + f"1,{SECRET}é,yes\n".encode("latin-1"), "not UTF-8"),
    ("UTF-16", "t.csv", TABLE.encode("utf-16"), "not UTF-8"),
    ("a picture", "t.csv", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not UTF-8"),
    ("one class", "t.csv", b"a,label\n" + b"1,yes\n" * 50, "at least two are needed"),
    ("no class", "t.csv", b"a,label\n" + b"1,\n" * 50, "at least two are needed"),
    ("a table of no kind", "t.xlsx", GOOD, "unknown kind"),
    ("a table without an ending", "table", GOOD, "unknown kind"),
    ("a pickle", "t.pkl", b"\x80\x04K\x01.", "unknown kind"),
    ("plain text as gzip", "t.csv.gz", GOOD, "cannot read it"),
    ("half a gzip", "t.csv.gz", gzip.compress(GOOD)[:-20], "cannot read it"),
    ("an empty gzip", "t.csv.gz", b"", "is empty"),
    ("gzip as plain text", "t.csv", gzip.compress(GOOD), "not UTF-8"),
    ("text as Parquet", "t.parquet", GOOD, "not a whole Parquet"),
    ("an empty Parquet", "t.parquet", b"", "not a whole Parquet"),
    ("a Parquet of marks", "t.parquet", b"PAR1" + b"\x00" * 64 + b"PAR1", "t.parquet"),
    ("text as Arrow", "t.arrow", GOOD, "t.arrow"),
    ("an empty Arrow", "t.arrow", b"", "t.arrow"),
    ("an Arrow of marks", "t.feather", b"ARROW1\x00\x00" + b"\x00" * 64 + b"ARROW1", "t.feather"),
)


def _damaged_gzip(folder: Path) -> None:
    data = bytearray(gzip.compress(GOOD * 50))
    data[len(data) // 2] ^= 255
    (folder / "t.csv.gz").write_bytes(bytes(data))


def _parquet(**columns: list) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns), folder / "t.parquet")

    return write


def _cut(part: float, ending: str = "parquet") -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({"a": [float(i) for i in range(3000)], "label": [SECRET, "no", "yes"] * 1000})
        if ending == "parquet":
            pq.write_table(table, folder / "t.parquet")
        else:
            with pa.ipc.new_file(folder / "t.arrow", table.schema) as sink:
                sink.write_table(table)
        path = folder / f"t.{ending}"
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * part)])

    return write


def _same_names(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), folder / "t.parquet")


def _on(name: str, *more: str) -> tuple[str, ...]:
    return ("train", "{dir}/" + name, *train()[2:], *more)


CASES = (
    *(
        Case(f"table: {what}", _on(name), match, lambda d, name=name, data=data: (d / name).write_bytes(data))
        for what, name, data, match in TABLES
    ),
    Case("table: damaged gzip", _on("t.csv.gz"), "cannot read it", _damaged_gzip),
    Case("table: half a Parquet", _on("t.parquet"), "not a whole Parquet", _cut(0.5)),
    Case("table: nearly all of a Parquet", _on("t.parquet"), "not a whole Parquet", _cut(0.99)),
    Case("table: half an Arrow file", _on("t.arrow"), "t.arrow", _cut(0.5, "arrow")),
    Case("table: a Parquet of no rows", _on("t.parquet"), "no rows", _parquet(a=[], label=[])),
    Case("table: a Parquet of lists", _on("t.parquet"), "holds lists", _parquet(a=[[1], [2]], label=["x", SECRET])),
    Case("table: a Parquet of records", _on("t.parquet"), "holds lists", _parquet(a=[{"k": SECRET}], label=["x"])),
    Case("table: labels that are lists", _on("t.parquet"), "holds lists", _parquet(a=[1, 2], label=[[SECRET], ["y"]])),
    Case("table: a Parquet without the target", _on("t.parquet"), "no column 'label'", _parquet(a=[1], b=[2])),
    Case("table: a Parquet with a name twice", _on("t.parquet"), "same name", _same_names),
    Case("table: labels all missing", _on("t.parquet"), "at least two", _parquet(a=[1, 2], label=[None, None])),
    Case("predict: no such column", ("predict", "{model}", "{dir}/t.csv"), "no column 'b'",
         lambda d: (d / "t.csv").write_text(f"a,c\n1,{SECRET}\n")),
    Case("predict: text for a number", ("predict", "{model}", "{dir}/t.csv", "--out", "{dir}/p.csv"), "no number",
         lambda d: (d / "t.csv").write_text(f"a,b\n1,b\n{SECRET},c\n")),
    Case("predict: a row too long", ("predict", "{model}", "{dir}/t.csv", "--out", "{dir}/p.csv"), "row 3 has 3 fields",
         lambda d: (d / "t.csv").write_text(f"a,b\n1,b\n2,c,{SECRET}\n")),
    Case("predict: half a Parquet", ("predict", "{model}", "{dir}/t.parquet", "--out", "{dir}/p.csv"), "t.parquet",
         _cut(0.5)),
    Case("predict: an empty table", ("predict", "{model}", "{dir}/t.csv", "--out", "{dir}/p.csv"), "is empty",
         lambda d: (d / "t.csv").write_bytes(b"")),
)  # fmt: skip
