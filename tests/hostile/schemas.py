"""Hostile schemas."""

from __future__ import annotations

from tests.hostile.kit import Case, train

COLUMN = '{"columns": [%s]}'

SCHEMAS: tuple[tuple[str, str, str], ...] = (
    # what is wrong, contents of the file, what the line must hold
    ("empty", "", "not valid JSON"),
    ("half", '{"columns": [', "not valid JSON"),
    ("a list", "[]", "schema"),
    ("a number", "5", "schema"),
    ("null", "null", "schema"),
    ("a text", '"columns"', "schema"),
    ("nested deeply", "[" * 100_000, "not valid JSON"),
    ("a comment", '{"columns": []} // all of them', "not valid JSON"),
    ("single quotes", "{'columns': []}", "not valid JSON"),
    ("a key twice", '{"ignore": ["a"], "ignore": ["b"]}', "twice"),
    ("an unknown entry", '{"colums": []}', "unknown entry 'colums'"),
    ("columns as an object", '{"columns": {"a": "numeric"}}', "'columns'"),
    ("columns as a text", '{"columns": "a"}', "'columns'"),
    ("columns null", '{"columns": null}', "'columns'"),
    ("a column as a text", COLUMN % '"a"', "column 1"),
    ("a column as a list", COLUMN % '["a", "numeric"]', "column 1"),
    ("a column null", COLUMN % "null", "column 1"),
    ("a column without a name", COLUMN % '{"type": "numeric"}', "'name' and 'type'"),
    ("a column without a type", COLUMN % '{"name": "a"}', "'name' and 'type'"),
    ("a column with an extra", COLUMN % '{"name": "a", "type": "numeric", "unit": "m"}', "column 1"),
    ("a name that is null", COLUMN % '{"name": null, "type": "numeric"}', "'name'"),
    ("a name that is a list", COLUMN % '{"name": ["a"], "type": "numeric"}', "'name'"),
    ("a type that is none", COLUMN % '{"name": "a", "type": "text"}', "type must be"),
    ("a type that is a number", COLUMN % '{"name": "a", "type": 3}', "'type'"),
    ("a type that is a list", COLUMN % '{"name": "a", "type": ["numeric"]}', "'type'"),
    ("low without high", COLUMN % '{"name": "a", "type": "numeric", "low": 0}', "both low and high"),
    ("low above high", COLUMN % '{"name": "a", "type": "numeric", "low": 1, "high": 0}', "low <= high"),
    ("low as a text", COLUMN % '{"name": "a", "type": "numeric", "low": "0", "high": 1}', "'low'"),
    ("low as a truth", COLUMN % '{"name": "a", "type": "numeric", "low": true, "high": 2}', "'low'"),
    ("low as NaN", COLUMN % '{"name": "a", "type": "numeric", "low": NaN, "high": 1}', "not valid JSON"),
    ("high as Infinity", COLUMN % '{"name": "a", "type": "numeric", "low": 0, "high": Infinity}', "not valid JSON"),
    ("high that overflows", COLUMN % '{"name": "a", "type": "numeric", "low": 0, "high": 1e999}', "not valid JSON"),
    ("high of 400 digits", COLUMN % ('{"name": "a", "type": "numeric", "low": 0, "high": %s}' % ("9" * 400)), "'high'"),
    (
        "high of 5000 digits",
        COLUMN % ('{"name": "a", "type": "numeric", "low": 0, "high": %s}' % ("9" * 5000)),
        "schema",
    ),
    ("a range of a category", COLUMN % '{"name": "b", "type": "categorical", "low": 0, "high": 1}', "takes no range"),
    ("a range of a flag", COLUMN % '{"name": "a", "type": "flag", "low": 0, "high": 1}', "takes no range"),
    ("categories of a number", COLUMN % '{"name": "a", "type": "numeric", "categories": ["x"]}', "takes no categories"),
    ("categories as a text", COLUMN % '{"name": "b", "type": "categorical", "categories": "abc"}', "'categories'"),
    (
        "categories as an object",
        COLUMN % '{"name": "b", "type": "categorical", "categories": {"a": 1}}',
        "'categories'",
    ),
    (
        "categories with null",
        COLUMN % '{"name": "b", "type": "categorical", "categories": ["a", null]}',
        "'categories'",
    ),
    ("categories of lists", COLUMN % '{"name": "b", "type": "categorical", "categories": [["a"]]}', "'categories'"),
    ("a category twice", COLUMN % '{"name": "b", "type": "categorical", "categories": ["a", "a"]}', "twice"),
    ("one spelling twice", COLUMN % '{"name": "b", "type": "categorical", "categories": [1, "1"]}', "twice"),
    ("a column twice", COLUMN % '{"name": "a", "type": "flag"}, {"name": "a", "type": "numeric"}', "twice"),
    ("a column that is not there", COLUMN % '{"name": "z", "type": "flag"}', "no column 'z'"),
    ("the target as a feature", COLUMN % '{"name": "label", "type": "categorical"}', "target"),
    ("the target ignored", '{"ignore": ["label"]}', "target"),
    ("ignore as a text", '{"ignore": "a"}', "'ignore'"),
    ("ignore of numbers", '{"ignore": [1]}', "'ignore'"),
    ("ignore null", '{"ignore": null}', "'ignore'"),
    ("ignore nobody", '{"ignore": ["z"]}', "no column 'z'"),
    ("described and ignored", '{"columns": [{"name": "a", "type": "flag"}], "ignore": ["a"]}', "described and ignored"),
    ("ignore everything", '{"ignore": ["a", "b"]}', "no columns are left"),
    ("classes as a number", '{"classes": 5}', "'classes'"),
    ("classes as a text", '{"classes": "yes"}', "'classes'"),
    ("one class", '{"classes": ["yes"]}', "'classes'"),
    ("classes with null", '{"classes": ["yes", null]}', "'classes'"),
    ("classes of lists", '{"classes": [["yes"], ["no"]]}', "'classes'"),
    ("a class twice", '{"classes": ["yes", "yes"]}', "twice"),
    ("target_range as a number", '{"target_range": 5}', "'target_range'"),
    ("target_range of texts", '{"target_range": ["0", "1"]}', "'target_range'"),
    ("target_range of one", '{"target_range": [0]}', "'target_range'"),
    ("target_range upside down", '{"target_range": [1, 0]}', "'target_range'"),
    ("target_range of a class", '{"target_range": [0, 1]}', "--task regression"),
)


def _case(name: str, text: str, match: str) -> Case:
    return Case(
        f"schema: {name}", train("--schema", "{dir}/s.json"), match,
        lambda d: (d / "s.json").write_text(text, encoding="utf-8"),
    )  # fmt: skip


CASES = (
    *(_case(*schema) for schema in SCHEMAS),
    Case("schema: not UTF-8", train("--schema", "{dir}/s.json"), "not valid JSON",
         lambda d: (d / "s.json").write_bytes(b'{"ignore": ["\xff\xfe"]}')),
    Case("schema: UTF-16", train("--schema", "{dir}/s.json"), "not valid JSON",
         lambda d: (d / "s.json").write_text('{"columns": []}', encoding="utf-16")),
    Case("schema: the same column categorical", train("--schema", "{dir}/s.json", "--categorical", "a"), "another type",
         lambda d: (d / "s.json").write_text(COLUMN % '{"name": "a", "type": "numeric"}')),
)  # fmt: skip
