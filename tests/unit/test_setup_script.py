"""`examples/_setup.sh`: which Python is taken, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bash(script: str, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", "-c", f"set -u; source '{ROOT}/examples/_setup.sh'; {script}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": path, "HOME": os.environ.get("HOME", "/"), **environment},
    )


@pytest.fixture
def tools(tmp_path) -> Path:
    """A PATH folder with the plain tools the script uses and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("dirname", "cat", "cksum", "grep", "sort"):
        source = next(p for p in (Path("/usr/bin") / name, Path("/bin") / name) if p.exists())
        (folder / name).symlink_to(source)
    return folder


def script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_an_active_environment_is_honoured(tools):
    script(tools, "python", f'exec "{sys.executable}" "$@"')
    done = bash('mp_setup test && echo "$MP_PYTHON|$PYTHONPATH|$MP_ROOT"', str(tools))
    assert done.stdout.strip() == f"{tools}/python|{ROOT}|{ROOT}", done.stderr
    assert done.stderr == ""


def test_the_callers_python_is_checked(tools):
    script(tools, "old", "exit 1")
    done = bash("mp_setup", str(tools), MP_PYTHON=f"{tools}/old")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: MP_PYTHON={tools}/old is no Python >= 3.12 with megatron"
    )
    done = bash('mp_setup dev; echo "$MP_PYTHON"', str(tools), MP_PYTHON=sys.executable)
    assert done.stdout.strip() == sys.executable


def test_nothing_is_made_when_told_so(tools, tmp_path):
    before = (ROOT / ".venv").exists()
    done = bash(f"MP_ROOT='{tmp_path}'; mp_setup test", str(tools), MP_SETUP="never")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"pip install -e '{tmp_path}[test]'" in done.stderr
    assert (ROOT / ".venv").exists() == before


def test_no_new_enough_python_is_one_clear_sentence(tools):
    script(tools, "python3", '[[ ${1:-} == -V ]] && echo "Python 3.10.1"; exit 1')
    done = bash("mp_find_python", str(tools))
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: Python 3.12 or newer")
    assert "python3 here is Python 3.10.1" in done.stderr and "MP_BASE_PYTHON" in done.stderr


@pytest.mark.parametrize("where", ["MP_BASE_PYTHON", "pyenv", "uv"])
def test_a_new_enough_python_is_found(tools, tmp_path, where):
    base = sys.executable
    environment = {}
    if where == "MP_BASE_PYTHON":
        environment["MP_BASE_PYTHON"] = base
    elif where == "uv":
        script(tools, "uv", f"echo '{base}'")
    else:
        version = tmp_path / "versions" / "3.12.9" / "bin"
        version.mkdir(parents=True)
        script(version, "python", f'exec "{base}" "$@"')
        script(
            tools, "pyenv", f"[[ $1 == root ]] && echo '{tmp_path}' || printf '3.9.1\\n3.12.9\\n'"
        )
    done = bash("mp_find_python", str(tools), **environment)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(base)
