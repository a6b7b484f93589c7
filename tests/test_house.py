"""The rules of the house: import direction, light imports, file sizes, licence and version in one place."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lowbit

PACKAGE = Path(lowbit.__file__).parent
RANK = {
    "_version": 0,
    "errors": -1,  # everything may raise them
    "compiling": 0,
    "hardware": 0,
    "places": 0,
    "store": 0,
    "timing": 0,
    "formats": 1,
    "packing": 2,
    "kernels": 3,
    "dispatch": 4,
    "attention": 5,
    "nn": 5,
    "checkpoint": 6,
    "models": 7,
    "quantizers": 8,
    "tuner": 8,
    "evaluate": 8,
    "runtime": 9,
    "report": 9,
    "plugins": 10,
    "server": 10,
    "cli": 11,
}
HEAVY = {"triton", "llvmlite", "fastapi", "transformers", "matplotlib", "typer", "rich", "gguf", "tokenizers", "jinja2"}


def imports(path: Path) -> set[str]:
    """Dotted names a file imports from lowbit, `from lowbit.x import y` as lowbit.x."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            found.add(node.module or "")
            if node.module == "lowbit":
                found |= {f"lowbit.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("lowbit.")}


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_upward(path: Path) -> None:
    here = home(path)
    for name in imports(path):
        there = name.split(".")[1]
        if there in {"__version__"}:
            continue
        assert there in RANK, f"{path}: {name} is not in the list of folders"
        assert there == here or RANK[there] < RANK[here], f"{path}: {here} may not import {there}"


def test_every_folder_has_a_rank() -> None:
    names = {p.stem if p.is_file() else p.name for p in PACKAGE.iterdir() if p.suffix in {"", ".py"}}
    assert names - {"__init__", "__main__", "__pycache__"} <= set(RANK)


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


def test_import_is_light() -> None:
    loaded = run("import sys, lowbit; print(*{m.split('.')[0] for m in sys.modules})").split()
    assert not HEAVY & set(loaded)


def test_core_imports_nothing_heavy() -> None:
    code = "import sys, torch; before = set(sys.modules); import lowbit; lowbit.quantize, lowbit.matmul, lowbit.nn; "
    loaded = run(code + "print(*{m.split('.')[0] for m in set(sys.modules) - before})").split()
    assert not HEAVY & set(loaded)


def test_public_names_exist() -> None:
    for name in lowbit.__all__:
        assert getattr(lowbit, name) is not None
    with pytest.raises(AttributeError, match="module 'lowbit' has no attribute 'quantise'; its public names are"):
        _ = lowbit.quantise


def test_files_stay_small() -> None:
    lines = sorted(len(path.read_text().splitlines()) for path in FILES)
    assert lines[len(lines) // 2] <= 200
    assert lines[-1] <= 320


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by name alone: two of one name end a run."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
