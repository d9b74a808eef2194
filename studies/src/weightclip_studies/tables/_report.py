"""`weightclip-study reproduce report`: everything on one self-contained HTML page, light and dark."""

from __future__ import annotations

import base64
import json
from importlib import resources
from pathlib import Path
from typing import Any

from weightclip.errors import WeightclipError

from ._output import LABELS
from ._paper import printed
from ._space import METHODS


def _inline(folder: Path):
    """A template function that puts a picture of the folder into the page itself; nothing if it is not there."""
    from markupsafe import Markup, escape

    def figure(name: str, caption: str) -> Markup:
        path = folder / name
        if not path.exists():
            return Markup("")
        data = base64.b64encode(path.read_bytes()).decode()
        return Markup(
            f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    return figure


def _accuracy_blocks(rows: list[dict[str, Any]], datasets: list[str]) -> list[dict[str, Any]]:
    found = {(r["dataset"], r["method"], r["group_norm"]): r for r in rows}
    blocks = []
    for group_norm in (False, True):
        lines = []
        for method in METHODS:
            mine = [found.get((d, method, group_norm)) for d in datasets]
            if not any(mine):
                continue
            cells = [
                {"text": f"{r['median']:.3f}", "sd": f"±{r['sd']:.3f}" if r["sd"] > 0 else "", "mark": r["mark"]}
                if r
                else None
                for r in mine
            ]
            lines.append({"label": LABELS[method], "cells": cells, "kind": ""})
        if not lines:
            continue
        for place, label in enumerate(("DP-SGD", "Lip-DP-SGD", "Fix-Lip-DP-SGD")):
            values = [(printed(d).grouped if group_norm else printed(d).plain)[place] for d in datasets]
            cells = [{"text": f"{v:.3f}", "sd": "", "mark": ""} for v in values]
            lines.append(
                {"label": f"paper: {label}", "cells": cells, "kind": "paper" + (" rule" if place == 0 else "")}
            )
        title = "With group normalisation" if group_norm else "Without group normalisation (Table 1)"
        blocks.append({"title": title, "lines": lines})
    return blocks


def _quality_blocks(rows: list[dict[str, Any]], datasets: list[str]) -> list[dict[str, Any]]:
    found = {(r["dataset"], r["method"]): r for r in rows if not r["group_norm"]}
    blocks = []
    names = {
        "auc": "Area under the curve (higher is better)",
        "log_loss": "Log-loss (lower is better)",
        "ece": "Expected calibration error (lower is better)",
    }
    for key, title in names.items():
        lines = []
        for method in METHODS:
            mine = [found.get((d, method)) for d in datasets]
            if any(mine):
                lines.append({"label": LABELS[method], "cells": [f"{r[key]:.3f}" if r else "" for r in mine]})
        blocks.append({"title": title, "lines": lines})
    return blocks


def _read(path: Path, default: Any = None) -> Any:
    if not path.exists():
        return default
    return json.loads(path.read_text(encoding="utf-8"))


def write_report(folder: Path, page: Path | None = None) -> Path:
    """Write the page from what `reproduce tables` and `reproduce bias` left in a folder.

    Args:
        folder: Where they wrote.
        page: File to write; ``report.html`` in the folder by default.

    Raises:
        FileNotFoundError: If the tables are missing.
    """
    try:
        from jinja2 import Environment, StrictUndefined, select_autoescape
    except ImportError as error:
        raise WeightclipError("the report needs Jinja2: pip install -e studies") from error

    main = json.loads((folder / "table1.json").read_text(encoding="utf-8"))
    rows, verdicts = main["rows"], main["verdicts"]
    bias = _read(folder / "bias.json")
    chosen = json.loads((resources.files("weightclip_studies.tables") / "chosen.json").read_text(encoding="utf-8"))
    datasets = list(dict.fromkeys(r["dataset"] for r in rows))
    accounted = [
        {"dataset": path.stem.removeprefix("accounted_"), "method": method, **found}
        for path in sorted(folder.glob("accounted_*.json"))
        for method, found in (_read(path) or {}).items()
    ]
    environment = Environment(autoescape=select_autoescape(default=True), undefined=StrictUndefined)
    template = environment.from_string(
        (resources.files("weightclip_studies.tables") / "report.html.j2").read_text(encoding="utf-8")
    )
    text = template.render(
        figure=_inline(folder), rows=rows, verdicts=verdicts, datasets=datasets, command=main["command"],
        versions=main["versions"], budget=chosen["budget"], seeds=max(r["seeds"] for r in rows),
        epsilons={d: f"{printed(d).epsilon:g}" for d in datasets},
        above_paper=sum(v["above_paper"] for v in verdicts),
        better=sum(v["verdict"] == "above" for v in verdicts), worse=sum(v["verdict"] == "below" for v in verdicts),
        even=sum(v["verdict"] == "not different" for v in verdicts),
        blocks=_accuracy_blocks(rows, datasets), quality=_quality_blocks(rows, datasets),
        bias=bias["two_point_example"] if bias else None,
        fronts=sorted(path.name for path in folder.glob("pareto_*.png")), accounted=accounted,
        wall=_read(folder / "wall.json", {}), run_seconds=sum(r["wall_s"] * r["seeds"] for r in rows),
    )  # fmt: skip
    page = folder / "report.html" if page is None else page
    page.write_text(text, encoding="utf-8")
    return page
