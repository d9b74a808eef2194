"""Hostile command lines."""

from __future__ import annotations

import os

from tests.hostile.kit import Case, train, tune

BAD_OPTIONS: tuple[tuple[str, str, str], ...] = (
    # option, value, what the line must name
    ("--epsilon", "abc", "--epsilon"), ("--epsilon", "", "--epsilon"), ("--epsilon", "-1", "--epsilon"),
    ("--epsilon", "0", "--epsilon"), ("--epsilon", "nan", "--epsilon"), ("--epsilon", "inf", "--epsilon"),
    ("--epsilon", "-inf", "--epsilon"), ("--epsilon", "1e-9", "--epsilon"), ("--epsilon", "1e-320", "--epsilon"),
    ("--epsilon", "1,5", "--epsilon"), ("--epsilon", "1e999", "--epsilon"), ("--epsilon", "0x10", "--epsilon"),
    ("--delta", "0", "--delta"), ("--delta", "1", "--delta"), ("--delta", "-1e-5", "--delta"),
    ("--delta", "nan", "--delta"), ("--delta", "0.99", "--delta"), ("--delta", "1e-30", "--delta"),
    ("--delta", "ten", "--delta"), ("--delta", "inf", "--delta"),
    ("--target", "nope", "no column 'nope'"), ("--target", "", "no column ''"), ("--target", "Label", "did you mean"),
    ("--target", "label\nlabel", "no column"), ("--target", "x" * 500, "no column"),
    ("--target", "[/red]", "no column"),
    ("--out", "", "exists already"), ("--out", ".", "exists already"), ("--out", "/", "exists already"),
    ("--out", "..", "exists already"), ("--out", "{data}", "exists already"), ("--out", "{model}", "exists already"),
    ("--out", "{data}/m", "is no folder"), ("--out", "{dir}/" + "m" * 240, "too long"),
    ("--out", "{dir}/" + "m" * 5000, "too long"),
    ("--schema", "{dir}/none.json", "schema"), ("--schema", "{dir}", "schema"), ("--schema", "{data}", "schema"),
    ("--schema", "/dev/null", "schema"),
    ("--task", "ranking", "--task"), ("--task", "", "--task"), ("--task", "Classification", "--task"),
    ("--classes", "yes", "--classes"), ("--classes", ",", "--classes"), ("--classes", "yes,yes", "twice"),
    ("--classes", "a,,b", "--classes"), ("--classes", "", "--classes"),
    ("--target-range", "0,1", "--target-range"), ("--target-range", "1", "--target-range"),
    ("--target-range", "a,b", "--target-range"), ("--target-range", "", "--target-range"),
    ("--ignore", "label", "target"), ("--ignore", "nope", "no column 'nope'"), ("--ignore", "", "no column ''"),
    ("--categorical", "label", "target"), ("--categorical", "nope", "no column 'nope'"),
    ("--hidden", "0", "--hidden"), ("--hidden", "-1", "--hidden"), ("--hidden", "abc", "--hidden"),
    ("--hidden", "8,", "--hidden"), ("--hidden", "1.5", "--hidden"), ("--hidden", "99999999999", "--hidden"),
    ("--hidden", "none,1", "--hidden"), ("--hidden", ",".join(["2"] * 1000), "--hidden"),
    ("--epochs", "0", "--epochs"), ("--epochs", "-1", "--epochs"), ("--epochs", "nan", "--epochs"),
    ("--epochs", "inf", "--epochs"), ("--epochs", "1e12", "--epochs"), ("--epochs", "many", "--epochs"),
    ("--seed", "-1", "--seed"), ("--seed", "abc", "--seed"), ("--seed", "1.5", "--seed"),
    ("--seed", str(2**80), "--seed"),
    ("--accountant", "moments", "accountant"), ("--accountant", "", "accountant"),
    ("--accountant", "PLD", "accountant"),
    ("--n-records", "0", "--n-records"), ("--n-records", "-5", "--n-records"), ("--n-records", "1e3", "--n-records"),
    ("--n-records", "many", "--n-records"),
    ("--delimiter", "", "--delimiter"), ("--delimiter", ";;", "--delimiter"), ("--delimiter", "\n", "--delimiter"),
    ("--delimiter", '"', "--delimiter"), ("--delimiter", ";", "no column 'label'"),
    ("--eps", "1", "--eps"), ("--privacy", "none", "--privacy"),
)  # fmt: skip

BAD_TUNE: tuple[tuple[str, str, str], ...] = (
    *(("--epsilon", value, "--epsilon") for value in ("nan", "inf", "-inf", "-1", "0", "text", "", "1e-9", "1e999")),
    *(("--delta", value, "--delta") for value in ("nan", "0", "1", "text")),
    *(("--mean-runs", value, "--mean-runs") for value in ("nan", "inf", "1", "-3", "1e9", "many")),
    *(("--score-noise", value, "--score-noise") for value in ("nan", "inf", "0", "-1", "loud")),
    ("--epochs", "nan", "--epochs"), ("--seed", "-1", "--seed"), ("--n-records", "0", "--n-records"),
    ("--workers", "0", "--workers"), ("--workers", "many", "--workers"), ("--steps", "5", "--steps"),
    ("--target", "nope", "no column 'nope'"), ("--out", "{data}", "exists already"),
    ("--epsilon", "0.01", "search less"),
)  # fmt: skip

REGRESSION = ("--task", "regression", "--target", "a")
OTHERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    # what is wrong, command line, what the line must name
    ("no options", ("train",), ""),
    ("no target", ("train", "{data}", "--epsilon", "1", "--out", "{dir}/m"), "--target"),
    ("no epsilon", ("train", "{data}", "--target", "label", "--out", "{dir}/m"), "--epsilon"),
    ("no out", ("train", "{data}", "--target", "label", "--epsilon", "1"), "--out"),
    ("two tables", train("{data}"), ""),
    ("unknown command", ("fit", "{data}"), "fit"),
    ("both scalings", train("--public-scaling", "--non-private-scaling"), "exclude"),
    ("public scaling without ranges", train("--public-scaling"), "no public"),
    ("overwriting no model", train("--out", "{dir}", "--overwrite"), "no model folder"),
    ("all columns ignored", train("--ignore", "a", "--ignore", "b"), "no columns are left"),
    ("ignored and categorical", train("--ignore", "b", "--categorical", "b"), "described and ignored"),
    ("range of a class", train("--target-range", "0,1"), "--target-range"),
    ("classes of a number", train(*REGRESSION, "--classes", "a,b"), "--classes"),
    ("range upside down", train(*REGRESSION, "--target-range", "2,1"), "--target-range"),
    ("empty range", train(*REGRESSION, "--target-range", "1,1"), "--target-range"),
    ("range of three", train(*REGRESSION, "--target-range", "1,2,3"), "--target-range"),
    ("range without end", train(*REGRESSION, "--target-range", "0,inf"), "--target-range"),
    ("range that is no number", train(*REGRESSION, "--target-range", "nan,1"), "--target-range"),
    ("predict nothing", ("predict",), ""),
    ("predict without table", ("predict", "{model}"), ""),
    ("predict without model", ("predict", "{dir}/none", "{data}"), "cannot read checksums.json"),
    ("a file as model", ("predict", "{data}", "{data}"), "cannot read checksums.json"),
    ("a folder as model", ("predict", "{dir}", "{data}"), "cannot read checksums.json"),
    ("a folder as table", ("predict", "{model}", "{dir}"), "unknown kind of table"),
    ("predict a missing table", ("predict", "{model}", "{dir}/none.csv"), "cannot read it"),
    ("predict into a folder", ("predict", "{model}", "{data}", "--out", "{dir}"), "a folder"),
    ("predict into the model", ("predict", "{model}", "{data}", "--out", "{model}"), "a folder"),
    ("predict over the table", ("predict", "{model}", "{data}", "--out", "{data}"), "the table that is read"),
    ("predict under a file", ("predict", "{model}", "{data}", "--out", "{data}/p.csv"), "cannot write it"),
    ("predict nowhere", ("predict", "{model}", "{data}", "--out", "{dir}/no/such/p.csv"), "cannot write it"),
    ("predict into a long name", ("predict", "{model}", "{data}", "--out", "{dir}/" + "p" * 300), "cannot write it"),
    ("predict with a bad delimiter", ("predict", "{model}", "{data}", "--delimiter", "ab"), "--delimiter"),
    ("predict with another delimiter", ("predict", "{model}", "{data}", "--delimiter", ";"), "has no column"),
    ("predict with an unknown option", ("predict", "{model}", "{data}", "--output", "x"), "--output"),
    ("certify nothing", ("certify",), ""),
    ("certify a missing model", ("certify", "{dir}/none"), "cannot read checksums.json"),
    ("certify a file", ("certify", "{data}"), "cannot read checksums.json"),
    ("certify two", ("certify", "{model}", "{model}"), ""),
    ("certify an empty name", ("certify", ""), "cannot read checksums.json"),
    ("tune a missing table", ("tune", "{dir}/none.csv", *tune()[2:]), "none.csv"),
    ("tune with an unknown option", tune("--trials", "0"), "--trials"),
    ("tune without epsilon", ("tune", "{data}", "--target", "label", "--out", "{dir}/m"), "--epsilon"),
    ("tune a number without a range", tune(*REGRESSION), "--target-range"),
    ("audit with an unknown option", ("audit", "--nope"), "--nope"),
)  # fmt: skip

LINKS: tuple[Case, ...] = (
    Case("predict into a link", ("predict", "{model}", "{data}", "--out", "{dir}/link"), "symbolic link",
         lambda d: (d / "link").symlink_to(d / "data.csv")),
    Case("predict into a link to nothing", ("predict", "{model}", "{data}", "--out", "{dir}/link"), "symbolic link",
         lambda d: (d / "link").symlink_to(d / "nothing")),
    Case("predict into a pipe", ("predict", "{model}", "{data}", "--out", "{dir}/pipe"), "no plain file",
         lambda d: os.mkfifo(d / "pipe")),
    Case("train into a link", train("--out", "{dir}/link", "--overwrite"), "symbolic link",
         lambda d: (d / "link").symlink_to(d / "model")),
    Case("train into a link to nothing", train("--out", "{dir}/link"), "symbolic link",
         lambda d: (d / "link").symlink_to(d / "nothing")),
    Case("train into a link to itself", train("--out", "{dir}/link"), "symbolic link",
         lambda d: (d / "link").symlink_to(d / "link")),
    Case("train over a model with notes", train("--out", "{model}", "--overwrite"), "besides a model",
         lambda d: (d / "model" / "notes.txt").write_text("mine")),
    Case("train from a pipe", ("train", "{dir}/pipe.csv", *train()[2:]), "no regular file",
         lambda d: os.mkfifo(d / "pipe.csv")),
    Case("train from a link to itself", ("train", "{dir}/loop.csv", *train()[2:]), "cannot read it",
         lambda d: (d / "loop.csv").symlink_to(d / "loop.csv")),
)  # fmt: skip

CASES = (
    *(
        Case(f"{option} {value[:20]!r} ({len(value)})", train(option, value), match)
        for option, value, match in BAD_OPTIONS
    ),
    *(Case(f"tune {option} {value!r}", tune(option, value), match) for option, value, match in BAD_TUNE),
    *(Case(*other) for other in OTHERS),
    *LINKS,
)
