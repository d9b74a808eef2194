from __future__ import annotations

import json

import numpy as np
import pytest

from weightclip.cli import main

RNG = np.random.default_rng(0)


def run(capsys, *arguments, expect=0):
    with pytest.raises(SystemExit) as exit:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    assert exit.value.code == expect, captured
    return captured


@pytest.fixture(scope="module", params=["classification", "regression"])
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("importances")
    a, b = RNG.uniform(-1, 1, (2, 1500))
    label = a.round(3) if request.param == "regression" else np.where(a > 0, "yes", "no")
    rows = "".join(f"{x:.3f},{y:.3f},{z}\n" for x, y, z in zip(a, b, label, strict=True))
    (folder / "d.csv").write_text("b,a,label\n" + rows)
    columns = [{"name": name, "type": "numeric", "low": -1, "high": 1} for name in "ab"]
    span = {"target_range": [-1, 1]} if request.param == "regression" else {}
    (folder / "s.json").write_text(json.dumps({"columns": columns, **span}))
    with pytest.raises(SystemExit) as exit:
        main(["train", str(folder / "d.csv"), "--target", "label", "--epsilon", "8", "--delta", "1e-6", "--seed", "0",
              "--task", request.param, "--schema", str(folder / "s.json"),
              "--accountant", "rdp", "--out", str(folder / "model")])  # fmt: skip
    assert exit.value.code == 0
    return folder


def test_from_the_model_alone_and_on_public_records(made, capsys):
    found = json.loads(run(capsys, "importances", made / "model", "--json").out)
    assert [row["column"] for row in found["columns"]] == ["b", "a"]
    assert "mean change" in run(capsys, "importances", made / "model").out
    found = json.loads(run(capsys, "importances", made / "model", "--public-data", made / "d.csv", "--json").out)
    assert found["columns"][0]["column"] == "b" and found["columns"][0]["importance"] > 0.3
    assert "1500 public records" in found["measure"]


def test_what_must_fail(made, tmp_path, capsys):
    (tmp_path / "e.csv").write_text("a,b\n1,2\n")
    (tmp_path / "f.csv").write_text("a,label\n1,yes\n")
    for more, match in (
        (("--public-data", tmp_path / "e.csv"), "no column 'label'"),
        (("--public-data", tmp_path / "f.csv"), "no column 'b'"),
        (("--public-data", made / "d.csv", "--target", "z"), "no column 'z'"),
        (("--target", "label"), "belong to --public-data"),
    ):
        error = run(capsys, "importances", made / "model", *more, expect=1).err.strip()
        assert error.startswith("error: ") and match in error and "\n" not in error
