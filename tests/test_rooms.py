"""The rooms of the house: who imports whom. Late imports and imports for type checkers count."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "weightclip"
STUDIES = Path(__file__).parents[1] / "studies" / "src" / "weightclip_studies"
COMMON = {"errors", "_torch", "_device"}  # common ground: no room, imported by all of them
# names of torch and of Python that something of ours has too; the mark of our hooks, which common ground reads
OTHERS = {"_parameters", "_modules", "_replace", "_weightclip"}
DOOR = ""


def room_of(module: str) -> str:
    """The room of ``a.b.c`` below weightclip, "" for the door."""
    return module.split(".")[0]


def imports(path: Path, package: Path = SOURCE) -> Iterator[tuple[str, str]]:
    """(module below weightclip, name) of everything that a file imports from weightclip."""
    here = path.relative_to(package).with_suffix("").parts
    here = here[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [a.name.split(".", 1) for a in node.names if a.name.split(".")[0] == "weightclip"]
            yield from ((rest[0] if rest else DOOR, "") for _, *rest in found)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                if package != SOURCE:
                    continue
                parts = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
                module = ".".join(p for p in parts if p)
            elif (node.module or "").split(".")[0] == "weightclip":
                module = (node.module or "").partition(".")[2]
            else:
                continue
            for alias in node.names:
                below = SOURCE.joinpath(*module.split("."), alias.name) if module else SOURCE / alias.name
                is_module = below.with_suffix(".py").exists() or below.is_dir()
                yield (f"{module}.{alias.name}".lstrip("."), "") if is_module else (module, alias.name)


def files() -> Iterator[tuple[str, Path]]:
    """(room, file) of every file but the door's."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if name != "__init__":
            yield name, path


def is_private(module: str, name: str) -> bool:
    return any(part.startswith("_") and part != "__version__" for part in [*module.split("."), name] if part)


def defined(tree: ast.AST) -> set[str]:
    """Private names that a file gives to something of its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _mine(node.value):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def _mine(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def foreign(tree: ast.AST, own: set[str], ours: set[str]) -> list[str]:
    """Private attributes of ours that are not ``own`` and are looked up on anything but self."""
    looked_up = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and not _mine(n.value))
    return [f"{n.lineno}: {ast.unparse(n)}" for n in looked_up if n.attr in ours - own - OTHERS]


def modules() -> dict[str, set[str]]:
    """File -> files that it imports when it runs, late imports included; not what only type checkers read."""
    paths = {".".join(("weightclip", *p.relative_to(SOURCE).with_suffix("").parts)): p for p in SOURCE.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        checks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
        skipped = {id(n) for check in checks for n in ast.walk(check)}
        taken = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and id(n) not in skipped]
        places = {(n.module or "", f"{n.module}.{alias.name}") for n in taken for alias in n.names}
        found[name] = {full if full in paths else module for module, full in places if module in paths}
    return found


def edges() -> dict[str, set[str]]:
    """Room -> rooms that it imports."""
    found: dict[str, set[str]] = {}
    for room, path in files():
        others = {room_of(module) for module, _ in imports(path)} - {room, *COMMON}
        found.setdefault(room, set()).update(others)
    return found


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Pairs of rooms each of which reaches the other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for room in graph.get(todo.pop(), ()):
                if room not in seen:
                    seen.add(room)
                    todo.append(room)
        return seen

    far = {room: reach(room) for room in graph}
    return {frozenset((a, b)) for a in graph for b in far[a] if a in far.get(b, ()) and a != b}


def test_no_room_reaches_into_another():
    wrong = [
        f"{path.relative_to(SOURCE)}: {module} {name}".strip()
        for room, path in files()
        for module, name in imports(path)
        if room_of(module) not in {room, *COMMON} and is_private(module, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_room_looks_up_private_attributes_of_another():
    trees = [(room, path, ast.parse(path.read_text(encoding="utf-8"))) for room, path in files()]
    own: dict[str, set[str]] = {}
    for room, _, tree in trees:
        own.setdefault(room, set()).update(defined(tree))
    ours = set().union(*own.values())
    wrong = [f"{path.relative_to(SOURCE)}:{where}" for room, path, tree in trees if room not in COMMON
             for where in foreign(tree, own[room], ours)]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_by_way_of_others():
    assert len(modules()) > 100 and not cycles(modules()), sorted(map(sorted, cycles(modules())))


def test_there_are_no_cycles_between_rooms():
    assert not cycles(edges()), sorted(map(sorted, cycles(edges())))


def test_common_ground_imports_no_room():
    graph = edges()
    assert all(not graph[name] for name in COMMON)


def test_the_studies_are_not_imported():
    for _, path in files():
        assert "weightclip_studies" not in path.read_text(encoding="utf-8").replace("`weightclip_studies", ""), path


def test_examples_use_nothing_of_the_studies():
    root = Path(__file__).parents[1]
    examples = sorted(root.glob("examples/*.py"))
    assert not [path.name for path in examples if "studies" in path.read_text(encoding="utf-8")]
    known = json.loads((STUDIES / "data" / "schema.json").read_text(encoding="utf-8"))["adult"]["columns"]
    assert json.loads((root / "examples" / "adult.json").read_text(encoding="utf-8")) == known
    data = [folder / "adult.csv.gz" for folder in (root / "examples", STUDIES / "data" / "files")]
    assert data[0].read_bytes() == data[1].read_bytes()


def test_the_door_opens_on_rooms_only():
    doors = {module for module, _ in imports(SOURCE / "__init__.py")}
    assert not [module for module in doors if is_private(module, "")]
    assert {room_of(module) for module in doors} <= {room for room, _ in files()}


@pytest.mark.parametrize("room", sorted({room for room, path in files() if path.parent != SOURCE}))
def test_every_room_says_what_it_is_for_and_who_may_import_it(room):
    said = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert len(said.splitlines()[0]) > 20
    found = re.search(r"Imports ([^;]*);\s([^.]*)\.", said)
    assert found, "the door ends with: Imports `room`, ...; imported by `room`, ..."
    graph = {name: others - {DOOR} for name, others in edges().items()}
    assert set(re.findall(r"`(\w+)`", found[1])) == graph[room]
    users = {name for name, others in graph.items() if room in others}
    assert "anybody" in found[2] or set(re.findall(r"`(\w+)`", found[2])) == users


def test_the_checks_can_fail():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) and not cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    tree = ast.parse("self._a = other._b + other._a + self._b + x._parameters")
    assert foreign(tree, defined(tree), {"_a", "_b", "_parameters"}) == ["1: other._b"]
    assert is_private("noise._release", "Release") and is_private("noise", "_x") and not is_private("noise", "Release")
    found = set(imports(SOURCE / "__init__.py"))
    assert ("engine", "PrivacyEngine") in found and ("nn", "") in found
