"""The repository's structure: which part may import which, and how large a file may grow."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for top in ("model", "recipes") for p in (REPOSITORY / top).rglob("*.py"))

# A part may import those to its right.
ALLOWED = {
    "model": {"model"},
    "recipes.config": {"recipes.config", "model"},
    "recipes.data": {"recipes.data", "recipes.config", "model"},
    "recipes.cluster": {"recipes.cluster", "recipes.config", "model"},
    "recipes.training": {"recipes.training", "recipes.data", "recipes.cluster", "recipes.config", "model"},
    "recipes": {"recipes", "recipes.training", "recipes.data", "recipes.cluster", "recipes.config", "model"},
}


def part_of(module: str) -> str:
    pieces = module.split(".")
    return ".".join(pieces[:2]) if ".".join(pieces[:2]) in ALLOWED else pieces[0]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(REPOSITORY).as_posix())
def test_imports_point_one_way(path):
    module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    own = part_of(module)
    for name in imported(path):
        if name.split(".")[0] in ("model", "recipes"):
            assert part_of(name) in ALLOWED[own], f"{path} ({own}) imports {name}"
        if own == "model":
            assert name.split(".")[0] not in ("deepspeed", "transformers", "datasets"), f"{path} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(REPOSITORY).as_posix())
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 400, f"{path}: is there a second responsibility in it?"
    assert path.stem not in {"utils", "util", "common", "helpers", "helper", "misc", "v2"}, f"{path}: says nothing"
