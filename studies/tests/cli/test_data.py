"""``weightclip-study data``: sets are listed, described and refused by name."""

from __future__ import annotations

import json

import pytest

from weightclip.tabular._columns import Schema
from weightclip_studies.cli import main


def run(*arguments, expect=0, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data", *arguments])
    assert stop.value.code == expect
    return capsys.readouterr()


@pytest.mark.parametrize("command", [(), ("list",), ("show",), ("fetch",)], ids=lambda words: " ".join(words) or "data")
def test_help_has_an_example(command, capsys):
    assert "Example: weightclip-study data" in run(*command, "--help", capsys=capsys).out


def test_data_commands(capsys):
    rows = json.loads(run("list", "--json", capsys=capsys).out)
    assert {"adult", "nursery", "mnist"} <= {row["name"] for row in rows}
    assert "income" in run("list", capsys=capsys).out
    assert "education" in run("show", "adult", capsys=capsys).out
    assert json.loads(run("show", "adult", "--json", capsys=capsys).out)["rows"] == 48842
    schema = Schema.from_json(json.loads(run("show", "german_credit", "--schema", capsys=capsys).out))
    assert len(schema.columns) == 20


@pytest.mark.parametrize(
    ("arguments", "match"), [(("show", "iris"), "unknown data set"), (("fetch", "imagenet"), "imagenet")]
)
def test_unknown_sets_are_refused_in_one_line(arguments, match, capsys):
    error = run(*arguments, expect=1, capsys=capsys).err.strip()
    assert error.startswith("error: ") and "\n" not in error and match in error
