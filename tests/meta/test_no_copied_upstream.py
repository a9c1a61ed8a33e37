"""Law 1: no file, and no passage, is copied from upstream."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tests.meta.tree import ROOT, sources

#: So many consecutive lines of substance in common are a copy.
RUN = 12


def substance(text: str) -> list[tuple[int, str]]:
    """Lines that say something, without comments and spacing, with their numbers."""
    kept = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r"\s+", " ", line.split("#")[0]).strip()
        if len(bare) > 4 and not bare.startswith(("import ", "from ", "@")):
            kept.append((number, bare))
    return kept


def shingles(text: str) -> dict[tuple[str, ...], int]:
    lines = substance(text)
    return {
        tuple(bare for _, bare in lines[i : i + RUN]): lines[i][0]
        for i in range(len(lines) - RUN + 1)
    }


def test_no_passage_is_upstreams(law):
    upstream: dict[tuple[str, ...], str] = {}
    for package in find_spec("megatron").submodule_search_locations:
        for path in Path(package).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            upstream |= {s: f"{path.relative_to(package)}:{n}" for s, n in shingles(text).items()}
    assert len(upstream) > 50_000
    breaches = [
        f"{path}:{number} equals upstream's {upstream[shingle]}"
        for path, _ in (*sources(), *sources("toolkits"), *sources("tests"))
        for shingle, number in shingles((ROOT / path).read_text(encoding="utf-8")).items()
        if shingle in upstream
    ]
    law(breaches, f"{RUN} lines in a row are the same as upstream's; extend, do not copy")


def test_the_comparison_finds_a_copy():
    package = next(iter(find_spec("megatron").submodule_search_locations))
    text = (Path(package) / "core" / "utils.py").read_text()
    copy = "\n".join("        " + line for line in text.splitlines()[300:400])
    assert shingles(copy).keys() & shingles(text).keys()
