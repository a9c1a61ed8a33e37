"""README commands, flags and families are real; nothing is declared and then ignored."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex

import pytest

from megatron_patch import cli
from megatron_patch.launch import flags as launcher
from megatron_patch.models import registry as families
from megatron_patch.training import args
from megatron_patch.training.flags import OWN_FLAGS, OwnFlags
from tests.meta.tree import ROOT, sources, tracked

GUIDES = [p for p in tracked() if p.name == "README.md"]


def commands(text: str) -> list[str]:
    """Command lines of the fenced shell blocks, continuation lines joined."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def words(command: str) -> list[str]:
    parts = shlex.split(command, comments=True)
    while parts and re.match(r"^\w+=", parts[0]):
        parts.pop(0)
    return parts


@pytest.mark.parametrize("guide", GUIDES, ids=str)
def test_commands_of_the_guides_exist(guide, law):
    breaches = []
    for command in commands((ROOT / guide).read_text()):
        parts = words(command)
        for part in parts:
            path = part.removeprefix("./")
            script = re.match(r"^(examples|toolkits|tests)/[\w./-]+\.(sh|py)$", path)
            if script and not (ROOT / path).is_file():
                breaches.append(f"{command}: no file {path}")
        name = parts[1] if parts[:1] == ["megatron-patch"] and len(parts) > 1 else "--help"
        if not name.startswith("-") and name not in cli.COMMANDS:
            breaches.append(f"{command}: no command {name}")
        for module in re.findall(r"-m (megatron_patch[\w.]*)", command):
            stem = ROOT / module.replace(".", "/")
            if not (stem.with_suffix(".py").is_file() or (stem / "__main__.py").is_file()):
                breaches.append(f"{command}: no module {module}")
    law(breaches, f"{guide} names what is not there")


STARTS_TRAINING = re.compile(
    r"run_mcore|run_pretrain|megatron_patch\.pretrain|megatron-patch check"
)


def test_flags_of_the_guides_exist(law):
    """Every --flag on a launcher or trainer line of a guide is in a flag table."""
    known = {o for flag in OWN_FLAGS for o in (flag.name, *flag.aliases)}
    known |= {o for flag in args._compat.flag_table() for o in flag.options}
    known |= {o for flag in launcher.LAUNCHER_FLAGS for o in (flag.name, *flag.aliases)}
    known |= {"--standalone"}  # torchrun's
    breaches = []
    for guide in GUIDES:
        for command in commands((ROOT / guide).read_text()):
            if not STARTS_TRAINING.search(command):
                continue
            for flag in re.findall(r"(?<=\s)--[a-z][\w-]*", command):
                name = flag.replace("_", "-")
                if not {name, "--" + name.removeprefix("--no-")} & known:
                    breaches.append(f"{guide}: {flag} in `{command}`")
    law(breaches, "flags that nobody reads")


def test_every_flag_of_ours_is_read_somewhere(law):
    """An option that is accepted and ignored is worse than an unknown one."""
    read = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and path.name != "args.py":
                read.add(node.value)
    fields = {field.name for field in dataclasses.fields(OwnFlags)}
    megatron = {flag.dest for flag in args._compat.flag_table()}
    breaches = []
    for flag in OWN_FLAGS:
        if flag.dest in fields:
            if not {flag.dest, flag.name} & read:
                breaches.append(f"{flag.name}: nobody reads own.{flag.dest}")
        elif flag.dest not in megatron:
            breaches.append(f"{flag.name}: {flag.dest} is neither ours nor Megatron's")
    breaches += [
        f"OwnFlags.{name} has no flag" for name in fields - {flag.dest for flag in OWN_FLAGS}
    ]
    law(breaches, "every declared option is read outside its definition")


def test_no_spelling_means_two_things():
    spellings = [o for flag in OWN_FLAGS for o in (flag.name, *flag.aliases)]
    twice = {s for s in spellings if spellings.count(s) > 1}
    assert not twice


def test_every_family_has_its_test(law):
    tests = {p.stem for p in tracked() if p.parts[:2] == ("tests", "models")}
    own = [
        name
        for name in families.families()
        if (ROOT / "megatron_patch" / "models" / f"{name}.py").is_file()
    ]
    law([n for n in own if f"test_{n}" not in tests], "these families have no tests/models/test_*")
