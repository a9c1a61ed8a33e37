"""No test is left out: not by the name of its directory, not by that of another test."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatch

from tests.meta.tree import ROOT


def test_every_directory_of_tests_is_searched(request):
    skipped = request.config.getini("norecursedirs")
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert {"dist", "unit", "models"} <= folders
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in skipped)]


def test_names_of_test_files_are_unique():
    """Two files of one name cannot be collected in one run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
