#!/usr/bin/env python3
"""A small real data set to try fine-tuning with: what a function of Python's library does.

    python toolkits/sft_data_preprocessing/docstring_chats.py chats.jsonl

Every record is a chat: the question names a function of the standard library, the answer is the
first sentence of its documentation. Nothing is downloaded; modules are parsed, not imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def functions(folder: Path) -> Iterator[tuple[str, str]]:
    """Dotted name and first sentence of every documented public function."""
    for file in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):
        parts = file.relative_to(folder).with_suffix("").parts
        if any(p.startswith("_") and p != "__init__" for p in parts) or "test" in str(parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.parse(file.read_text(encoding="utf-8", errors="replace")).body:
            inner = node.body if isinstance(node, ast.ClassDef) else []
            for item in (node, *inner):
                if not isinstance(item, ast.FunctionDef) or item.name.startswith("_"):
                    continue
                said = (ast.get_docstring(item) or "").split("\n\n")[0]
                said = re.split(r"(?<=[.!?])\s", " ".join(said.split()))[0]
                owner = f"{module}.{node.name}" if item is not node else module
                if 20 <= len(said) <= 160 and said[0].isupper() and said.endswith("."):
                    yield f"{owner}.{item.name}", said


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="JSON lines to write")
    options = parser.parse_args()
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What does {name}() do?"},
                {"role": "assistant", "content": said},
            ]
        }
        for name, said in functions(Path(sysconfig.get_path("stdlib")))
    ]
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{options.output}: {len(rows)} chats")


if __name__ == "__main__":
    main()
