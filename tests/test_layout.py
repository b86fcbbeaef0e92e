"""The layers of the package, enforced: imports only ever point up the list. And no file knows a machine."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mha2gqa"
LAYERS = [
    "errors",
    "results",
    "distributed",
    "progress",
    "assets",
    "config",
    "modeling",
    "checkpoints",
    "architectures",
    "heads",
    "lm_head",
    "data",
    "arch_conversion",
    "kv_cache",
    "report",
    "evaluation",
    "calibration",
    "merging",
    "reconstruct",
    "verification",
    "conversion",
    "uptraining",
    "commands",
    "cli",
]
LIGHT = [
    m
    for m in ("errors", "results", "distributed", "progress", "config", "architectures", "report", "cli")
    if importlib.util.find_spec(f"mha2gqa.{m}")
]


def layer_of(parts: tuple[str, ...]) -> str:
    return parts[0] if parts else "__init__"


def imported_layers(path: Path) -> set[str]:
    """Layers that a module of the package imports, anywhere in the file."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    package = here if path.name == "__init__.py" else here[:-1]
    package = package[:-1] if path.name == "__init__.py" else package
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple(
                (node.module or "").split(".") if node.module else ()
            )
            found |= {layer_of(base)} if base else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mha2gqa":
            rest = tuple((node.module or "").split(".")[1:])
            found |= {layer_of(rest)} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("mha2gqa.")}
    return found - {"__version__"}


def modules() -> list[Path]:
    return sorted(
        p for p in PACKAGE.rglob("*.py") if p.name not in ("__main__.py",) and p != PACKAGE / "__init__.py"
    )


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_up_the_list(path: Path) -> None:
    own = layer_of(path.relative_to(PACKAGE).with_suffix("").parts)
    assert own in LAYERS, f"{own} has no place in the list of layers"
    for layer in imported_layers(path) - {own}:
        assert layer in LAYERS, f"{path.name} imports {layer}, which has no place in the list of layers"
        assert LAYERS.index(layer) < LAYERS.index(own), f"{own} imports {layer}, which is below it"


def test_no_two_modules_have_one_name() -> None:
    """A file of `config/` may be called as the command or the room whose options it declares."""
    names = Counter(
        path.stem for path in modules() if path.name != "__init__.py" and "config" not in path.parts
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_light_modules_import_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT}: importlib.import_module('mha2gqa.' + name)\n"
        "assert not {'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_exported_modelling_code_imports_nothing_of_the_package() -> None:
    for path in (PACKAGE / "modeling").glob("modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        assert "mha2gqa" not in re.sub(r'""".*?"""|#.*', "", text, flags=re.S), path.name


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_file_holds_a_path_of_somebodys_machine() -> None:
    machine = re.compile(r"(?<![\w./~-])/(?:home|work|Users|root|mnt|data[0-9]?)/[\w.-]+|[A-Z]:\\\\Users")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):  # the last: a link to a folder
            continue
        if path == Path(__file__) or "assets" in path.parts:
            continue
        found += [f"{path.relative_to(ROOT)}: {m[0]}" for m in machine.finditer(text)]
    assert not found, found
