"""Files that only services read (workflow, templates, citation) parse, and agree with the rest of the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import weightclip as wc

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")


def read(name: str) -> Any:
    """A YAML file of the repository."""
    return yaml.safe_load((ROOT / name).read_text())


def project() -> dict[str, Any]:
    """What pyproject.toml says about the project."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def releases() -> list[str]:
    """Versions in the changelog, newest first, dates checked."""
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased", "the changelog begins with what is not released"
    matches = [re.fullmatch(r"(\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert all(matches), headings
    return [match[1] for match in matches if match]


def test_the_workflow_runs_what_developers_run() -> None:
    workflow = read(".github/workflows/ci.yml")
    assert {"lint", "test", "releases", "docs", "wheel"} <= set(workflow["jobs"])
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands and all(line.split()[0] == "make" and line.split()[1] in targets for line in commands), commands


def test_a_release_is_built_as_here_and_published_without_a_secret() -> None:
    jobs = read(".github/workflows/release.yml")["jobs"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands and all(line.split()[0] == "make" and line.split()[1] in targets for line in commands), commands
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["environment"] == "release"
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
    publish = [step["uses"] for step in jobs["publish"]["steps"]]
    assert any(step.startswith("pypa/gh-action-pypi-publish@") for step in publish)


def test_the_metadata_is_complete() -> None:
    about = project()
    for entry in ("description", "readme", "license", "license-files", "authors", "keywords", "classifiers"):
        assert about[entry], entry
    assert "Typing :: Typed" in about["classifiers"] and (ROOT / "src/weightclip/py.typed").exists()
    shown = (ROOT / "README.md").read_text()
    for extra in ("table", "text", "onnx", "docs", "dev"):
        assert extra in about["optional-dependencies"] and f".[{extra}]" in shown


def test_the_workflow_covers_every_declared_python_and_both_ends_of_torch() -> None:
    matrix = read(".github/workflows/ci.yml")["jobs"]["releases"]["strategy"]["matrix"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(project()["classifiers"]))
    assert matrix == {"python": declared, "torch": ["minimum", "newest"]}


def test_hooks_are_pinned() -> None:
    repositories = read(".pre-commit-config.yaml")["repos"]
    hooks = {hook["id"] for repository in repositories for hook in repository["hooks"]}
    assert {"ruff-check", "ruff-format", "check-added-large-files", "end-of-file-fixer"} <= hooks
    assert all(re.fullmatch(r"v\d+\.\d+\.\d+", repository["rev"]) for repository in repositories)


def test_text_files_end_as_the_hook_wants_them() -> None:
    kept = [
        path
        for folder in ("src", "studies", "tests", "docs", "examples", "tools", ".github")
        for path in (ROOT / folder).rglob("*")
    ]
    kept += list(ROOT.iterdir())
    endings = {".py", ".md", ".toml", ".yml", ".yaml", ".cff", ".txt"}
    made = ("_build", ".egg-info/")  # by Sphinx and pip
    files = [
        path for path in kept if path.suffix in endings and path.is_file() and not any(m in str(path) for m in made)
    ]
    wrong = [
        path.name for path in files if (text := path.read_text()) and (not text.endswith("\n") or text.endswith("\n\n"))
    ]
    assert len(files) > 100 and wrong == []


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")))
def test_issue_forms_are_complete(name: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{name}")
    if name == "config.yml":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert form["name"] and form["description"]
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert fields and all(part["id"] and part["attributes"]["label"] for part in fields)
    assert len({part["id"] for part in fields}) == len(fields)


def test_the_citation_is_that_of_the_last_release() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["message"]
    assert citation["license"] == project()["license"]
    assert citation["authors"] == [{"name": author["name"]} for author in project()["authors"]]
    assert str(citation["version"]) == releases()[0]
    assert f"## {citation['version']} - {citation['date-released']}" in (ROOT / "CHANGELOG.md").read_text()


def test_one_version_everywhere() -> None:
    assert wc.__version__ == project()["version"]
    order = [tuple(map(int, version.split("."))) for version in (project()["version"], *releases())]
    assert order == sorted(order, reverse=True), "the changelog lists releases from the newest to the oldest"
