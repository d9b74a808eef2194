"""``weightclip-study data``: the bundled and fetched data sets."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

_HELP = """Data sets: list them, describe one, fetch images.

Example: weightclip-study data show adult --schema
"""

app = typer.Typer(help=_HELP, no_args_is_help=True)


@app.command("list")
def list_sets(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Names of all data sets.

    Example: weightclip-study data list
    """
    from weightclip_studies import data

    rows = [{"name": n, "kind": "table", "records": data.describe(n).rows, "task": data.describe(n).task}
            for n in data.names()]  # fmt: skip
    rows += [{"name": n, "kind": "images", "records": None, "task": "image classification"} for n in data.image_names()]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['name']:16} {row['kind']:7} {row['records'] or '':>6}  {row['task']}")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a tabular set")],
    schema_file: Annotated[bool, typer.Option("--schema", help="print a schema file for weightclip train")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """What is publicly known of a tabular set: task, columns, ranges, licence.

    Example: weightclip-study data show adult --schema > adult.json
    """
    from weightclip_studies import data

    schema = data.describe(name)
    if schema_file:
        print(json.dumps(data.table_schema(schema).to_json(), indent=2))
        return
    if as_json:
        print(json.dumps({**asdict(schema), "columns": [asdict(c) for c in schema.columns]}, default=str))
        return
    print(schema)
    for c in schema.columns:
        known = ", ".join(c.categories) if c.kind == "categorical" else f"[{c.low:g}, {c.high:g}]"
        print(f"    {c.name:32} {c.kind:11} {known}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="an image set")],
    dest: Annotated[Path | None, typer.Option(help="folder (default: the user's cache)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Download an image set; every file is checked before it counts.

    Example: weightclip-study data fetch mnist
    """
    from weightclip_studies import data

    folder = data.fetch(name, dest, progress=not as_json)
    print(json.dumps({"name": name, "folder": str(folder)}) if as_json else folder)
