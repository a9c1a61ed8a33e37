"""The patch registry's rules: few patches, each with a reason and an end."""

from __future__ import annotations

import ast

from megatron_patch.patches import registry
from tests.meta.tree import ROOT, dotted, sources

BUDGET = 10


def test_fewer_than_ten_core_patches():
    """A patch is a file: one upstream defect, which may take more than one symbol to mend."""
    folder = ROOT / "megatron_patch" / "patches"
    names = [p.stem for p in folder.glob("*.py") if p.stem not in ("__init__", "registry")]
    assert 0 < len(names) < BUDGET, f"{names}: report the next defect upstream first"
    assert registry.patches("core")


def test_every_record_explains_itself(law):
    breaches = []
    for patch in registry.patches():
        for field in ("why", "upstream", "remove_when"):
            if len(getattr(patch, field)) < 15:
                breaches.append(f"{patch.name}: {field} is {getattr(patch, field)!r}")
        if not patch.upstream.startswith("https://"):
            breaches.append(f"{patch.name}: upstream is no link")
        if not patch.versions.endswith("<0.20"):
            breaches.append(f"{patch.name}: versions {patch.versions} have no end")
    law(breaches, "a patch says why it is there and when it goes")


def test_names_are_unique_over_all_groups():
    names = [patch.name for patch in registry.patches()]
    assert len(names) == len(set(names))


def test_every_patch_file_holds_records(law):
    breaches = [
        str(path)
        for path, tree in sources()
        if path.parts[1:2] == ("patches",)
        and path.name not in ("__init__.py", "registry.py")
        and not any(
            isinstance(node, ast.Assign | ast.AnnAssign)
            and "PATCHES" in map(dotted, getattr(node, "targets", None) or [node.target])
            for node in tree.body
        )
    ]
    law(breaches, "one upstream defect per file, in PATCHES")


def test_cpu_platform_never_touches_is_available():
    targets = {patch.target for patch in registry.patches("cpu")}
    assert targets, f"no records under {ROOT}"
    assert not {t for t in targets if t.endswith("is_available")}
