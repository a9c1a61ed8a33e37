"""The command-line program: what it lists, how it passes arguments on, how it fails."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from megatron_patch import __version__, cli
from megatron_patch.util import UserError


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_patch", *argv], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def command(monkeypatch):
    """A command of the test's own in the table; returns what it was called with."""
    calls: list[list[str]] = []
    module = types.ModuleType("megatron_patch_test_command")
    module.__spec__ = types.SimpleNamespace()
    module.main = lambda argv: calls.append(argv) or 5
    monkeypatch.setitem(sys.modules, module.__name__, module)
    table = {**cli.COMMANDS, "probe": (f"{module.__name__}:main", "For the test.")}
    monkeypatch.setattr(cli, "COMMANDS", table)
    return module, calls


def program(monkeypatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["megatron-patch", *argv])
    with pytest.raises(SystemExit) as stop:
        cli.run()
    return stop.value.code


def test_arguments_arrive_as_typed(monkeypatch, command):
    argv = ["--help", "-x", "--", "--lr=1e-4", "--tp", "2", "file", "--version"]
    assert program(monkeypatch, "probe", *argv) == 5
    assert command[1] == [argv]


def test_user_errors_are_one_sentence(monkeypatch, command, capsys):
    def fail(argv):
        raise UserError("--tp 3 does not divide the 8 heads; use 2, 4 or 8")

    command[0].main = fail
    assert program(monkeypatch, "probe") == 2
    assert capsys.readouterr().err == "error: --tp 3 does not divide the 8 heads; use 2, 4 or 8\n"


def test_a_file_that_cannot_be_used_is_one_sentence(monkeypatch, command, capsys, tmp_path):
    command[0].main = lambda argv: (tmp_path / "gone" / "x").write_text("")
    assert program(monkeypatch, "probe") == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/gone/x: No such file or directory\n"


def test_help_lists_what_exists_and_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['megatron-patch', '--help']\n"
        "from megatron_patch import cli\n"
        "try:\n    cli.run()\n"
        "finally:\n"
        "    heavy = {'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    print('HEAVY', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "HEAVY []" in done.stdout, done.stderr
    for name in cli.available():
        assert f" {name} " in done.stdout


def test_every_command_of_the_table_exists():
    assert cli.available() == tuple(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.available())
def test_every_command_explains_itself_without_torch(name):
    code = (
        "import sys; from megatron_patch import cli\n"
        "try:\n    status = cli.call(sys.argv[1], ['--help'])\n"
        "except SystemExit as stop:\n    status = stop.code or 0\n"
        "heavy = {'torch', 'megatron.core', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower() and len(done.stdout.splitlines()) > 3


def test_unknown_command_names_the_nearest():
    done = run("pretrian")
    assert (done.returncode, done.stderr) == (
        2,
        "error: no command 'pretrian'; did you mean pretrain?\n",
    )
    done = run("qqq")
    assert done.returncode == 2 and "there are info," in done.stderr


def test_version():
    assert run("--version").stdout.strip() == __version__


@pytest.mark.parametrize("argv", [["info"], ["--help"]])
def test_a_bare_python_is_told_what_is_missing(argv):
    """``info`` is the command that says what is missing, so it cannot need it."""
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv[0] = 'megatron-patch'\n"
        "import runpy; runpy.run_module('megatron_patch', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "package typer is not installed: pip install -e " in done.stderr


def test_a_package_that_a_command_lacks_is_one_sentence(monkeypatch, command, capsys):
    command[0].main = lambda argv: __import__("megatron_patch_is_not_there.x")
    assert program(monkeypatch, "probe") == 2
    assert "package megatron_patch_is_not_there is not installed" in capsys.readouterr().err
    command[0].main = lambda argv: __import__("megatron_patch.is_not_there")
    with pytest.raises(ModuleNotFoundError):  # ours: a fault of this library
        cli.call("probe", [])


def test_closed_pipe_is_no_traceback():
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m megatron_patch patches --group cpu | head -1",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr and done.stdout.startswith("[cpu]")


def test_patches_table():
    done = run("patches", "--group", "core")
    assert done.returncode == 0 and "fully-reshardable-padding" in done.stdout
    assert "not checked (--verify)" in done.stdout


@pytest.mark.slow
def test_patches_verify_checks_every_record():
    done = run("patches", "--verify")
    assert done.returncode == 0, done.stderr
    assert "patches fit megatron-core 0.19" in done.stderr and "not checked" not in done.stdout


@pytest.mark.slow
def test_patches_verify_fails_on_a_changed_target():
    code = (
        "import sys; from dataclasses import replace; from megatron_patch.patches import registry\n"
        "real = registry._group\n"
        "one = [p for p in real('core') if p.name == 'dataset-helpers']\n"
        "changed = [replace(p, fingerprint=('0' * 16,)) for p in one]\n"
        "registry._group = lambda group: changed\n"
        "sys.exit(registry.main(['--verify', '--group', 'core']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "error: patch dataset-helpers: the source of" in done.stderr
    assert "Install megatron-core" in done.stderr
