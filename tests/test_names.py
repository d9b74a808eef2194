"""Every name of weightclip that README, docs and examples use exists."""

from __future__ import annotations

import ast
import collections
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import weightclip as wc

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
# not after a slash, a dot or a dash (paths, addresses), not a file name, not an entry of a configuration file
_DOTTED = re.compile(r"(?<![\w./-])(wc|weightclip_studies|weightclip)((?:\.[A-Za-z_]\w*)+)")
_IMPORT = re.compile(r"from (weightclip(?:_studies)?(?:\.\w+)*) import (?:\(([^)]*)\)|([^\n#;]*))")
_FILES = {"json", "toml", "md", "py", "csv", "onnx"}


def names_in(text: str) -> set[str]:
    """Full names, ``weightclip.a.b``."""
    dotted = [(root.replace("wc", "weightclip"), rest) for root, rest in _DOTTED.findall(text)]
    found = {root + rest for root, rest in dotted if rest.rsplit(".", 1)[1] not in _FILES}
    for module, several, one in _IMPORT.findall(text):
        parts = [part.split(" as ")[0].strip() for part in (several or one).split(",")]
        found |= {f"{module}.{part}" for part in parts if re.fullmatch(r"\w+", part)}
    return found


def exists(name: str) -> bool:
    """Whether a full name can be reached by attributes from the door, or is a module with such an attribute."""
    path, *parts = name.split(".")
    value = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        try:
            value = getattr(value, part)
        except ModuleNotFoundError as error:  # a loop of another library's
            if (error.name or "weightclip").startswith("weightclip"):
                return False
            pytest.skip(f"{error.name} is not installed")
        except AttributeError:
            try:
                value = importlib.import_module(path)
            except ImportError:
                return False
    return True


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_names_exist(text):
    missing = sorted(name for name in names_in(text.read_text()) if not exists(name))
    assert not missing, f"{text.name} speaks of {missing}"


def test_the_search_finds_names():
    text = "`wc.Bounds()`, weightclip.nn.SafeGroupNorm. a/weightclip.toml\nfrom weightclip.nn import Project, nothing"
    found = {"Bounds", "nn.SafeGroupNorm", "nn", "nn.Project", "nn.nothing"}
    assert names_in(text) == {f"weightclip.{name}" for name in found}
    assert exists("weightclip.LipDPClassifier") and exists("weightclip.LipDPRegressor")
    assert not exists("weightclip.nn.nothing") and not exists("weightclip.nothing")


def test_estimators_are_at_the_door_and_come_only_when_asked_for():
    code = (
        "import sys, weightclip as wc\n"
        "assert 'sklearn' not in sys.modules\n"
        "assert {'LipDPClassifier', 'LipDPRegressor'} <= set(dir(wc)) and 'sklearn' not in sys.modules\n"
        "assert wc.LipDPClassifier.__name__ == 'LipDPClassifier' and 'sklearn' in sys.modules\n"
        "from weightclip import LipDPRegressor\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'LipDP'"):
        _ = wc.LipDP


def test_no_two_classes_share_a_name():
    """A name that stands for two things misleads whoever searches for it."""
    places = collections.defaultdict(list)
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(file.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
