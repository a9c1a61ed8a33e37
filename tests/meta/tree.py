"""What the laws are checked on: the tracked files of the checkout, parsed once."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_patch"


@cache
def tracked() -> tuple[Path, ...]:
    """Files that belong to the checkout, relative to it; without git, all but what is generated."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        paths = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        skip = {".venv", "build", "dist", "__pycache__"}
        paths = [p.relative_to(ROOT) for p in ROOT.rglob("*") if not skip & set(p.parts)]
    return tuple(sorted(p for p in paths if (ROOT / p).is_file()))


@cache
def sources(folder: str = "megatron_patch") -> tuple[tuple[Path, ast.Module], ...]:
    """Python files under a folder with their syntax trees."""
    return tuple(
        (path, ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path)))
        for path in tracked()
        if path.suffix == ".py" and path.parts[0] == folder
    )


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""
