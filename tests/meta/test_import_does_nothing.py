"""Law 2: importing patches nothing and loads nothing; what answers at once stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.meta.tree import ROOT, sources

HEAVY = ("torch", "megatron", "transformers", "transformer_engine", "matplotlib", "tensorboard")

#: Modules that are torch code by nature; everything else must import without it.
TORCH_ROOMS = (
    "megatron_patch.ops.",
    "megatron_patch.models.modules.",
    "megatron_patch.training.batch.",
    "megatron_patch.training.loss.",
    "megatron_patch.training.step.",
)


def modules() -> list[str]:
    names = []
    for path, _ in sources():
        parts = list(path.with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        if parts[-1] != "__main__" and not f"{name}.".startswith(TORCH_ROOMS):
            names.append(name)
    return names


def imported_by(*names: str) -> set[str]:
    code = (
        "import sys, importlib\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        f"print('LOADED', *sorted(set({HEAVY!r}) & set(sys.modules)))\n"
        "registry = sys.modules.get('megatron_patch.patches.registry')\n"
        "assert registry is None or registry.applied() == ()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("LOADED")[1].split())


def test_the_package_imports_nothing_of_its_own_either():
    code = (
        "import sys; before = set(sys.modules); import megatron_patch; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["megatron_patch"], done.stdout + done.stderr


def test_no_module_loads_torch_or_patches_at_import():
    light = modules()
    assert len(light) > 20
    if imported_by(*light):
        guilty = {name: found for name in light if (found := imported_by(name))}
        pytest.fail(f"import these inside the functions that need them: {guilty}")


def test_older_python_gets_one_clear_sentence():
    code = (
        "import sys; sys.version_info = (3, 11, 7, 'final', 0)\n"
        "try:\n    import megatron_patch\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("megatron_patch needs Python 3.12 or newer"), done.stderr
    assert len(done.stdout.splitlines()) == 1
