"""What pyproject.toml promises is what the code imports, and what the pins hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from megatron_patch import _compat
from tests.meta.tree import ROOT, sources, tracked

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {
    name: [Requirement(text) for text in texts]
    for name, texts in PROJECT["optional-dependencies"].items()
}

#: Imported module -> distribution, where the names differ.
DISTRIBUTIONS = {
    "megatron": "megatron-core",
    "fla": "flash-linear-attention",
    "transformer_engine": "transformer-engine",
    "transformer_engine_torch": "transformer-engine",
}
#: Dependencies that no line of ours imports, and who does.
FOR_OTHERS = {
    "einops": "megatron.core: latent attention, Megatron-FSDP; undeclared there",
    "psutil": "megatron.core.dist_checkpointing, for every save; undeclared there",
    "transformers": "megatron.core's tokenizers, and whoever loads an export",
    "safetensors": "transformers; the format of the weights that are converted",
    "sentencepiece": "transformers and megatron.core, for *.model tokenizers",
    "tensorboard": "torch.utils.tensorboard",
}
#: Optional things of which no extra is needed: absent, a feature is not offered.
OFFERED_IF_THERE = {"pyarrow", "zstandard", "tiktoken", "deep_ep", "wandb", "triton"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported() -> dict[str, set[str]]:
    """Third-party modules imported anywhere in the package -> the files that do."""
    found: dict[str, set[str]] = {}
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            else:
                continue
            for name in {n.split(".")[0] for n in names}:
                if name not in sys.stdlib_module_names and name != "megatron_patch":
                    found.setdefault(name, set()).add(str(path))
    return found


def test_every_import_is_declared(law):
    known = {canonical(r.name) for r in DEPENDENCIES}
    known |= {canonical(r.name) for requirements in EXTRAS.values() for r in requirements}
    breaches = [
        f"{name}: {', '.join(sorted(files))}"
        for name, files in imported().items()
        if canonical(DISTRIBUTIONS.get(name, name)) not in known and name not in OFFERED_IF_THERE
    ]
    law(breaches, "declare these in pyproject.toml")


def test_every_dependency_is_used(law):
    used = {canonical(DISTRIBUTIONS.get(name, name)) for name in imported()}
    breaches = [
        requirement.name
        for requirement in DEPENDENCIES
        if canonical(requirement.name) not in used | FOR_OTHERS.keys()
    ]
    law(breaches, "an installation stays light: drop these from pyproject.toml")


def test_bounds_are_those_of_compat():
    bounds = {r.name: r.specifier for r in DEPENDENCIES}
    core = f">={_compat.MEGATRON_CORE_MIN},<{_compat.MEGATRON_CORE_BELOW}"
    assert bounds["megatron-core"] == Requirement(f"x{core}").specifier
    assert bounds["torch"] == Requirement(f"x>={_compat.TORCH_MIN}").specifier
    assert PROJECT["requires-python"] == ">=3.12"


def pins() -> dict[str, Version]:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): Version(version) for name, version in pairs}


def test_pins_are_inside_the_declared_ranges(law):
    pinned, breaches = pins(), []
    wanted = [*DEPENDENCIES, *EXTRAS["fla"], *EXTRAS["fast"], *EXTRAS["test"], *EXTRAS["dev"]]
    for requirement in wanted:
        if requirement.name == "megatron-patch":
            continue
        version = pinned.get(canonical(requirement.name))
        if version is None:
            breaches.append(f"{requirement.name} has no pin")
        elif not requirement.specifier.contains(version, prereleases=True):
            breaches.append(f"{requirement} against the pin {version}")
    law(breaches, "bring .ci/constraints.txt and pyproject.toml together")


def test_extras_exist():
    assert {"te-cu12", "te-cu13", "fla", "fast", "test", "dev"} <= EXTRAS.keys()


def test_requirements_txt_names_no_version_of_its_own():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == ["-e ."]


def test_data_files_are_packaged():
    """Every file of the package that is no Python is in the wheel's file list."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = patterns["tool"]["setuptools"]["package-data"]["megatron_patch"]
    data = [p for p in tracked() if p.parts[0] == "megatron_patch" and p.suffix != ".py"]
    missing = [
        str(p)
        for p in data
        if not any(p.relative_to("megatron_patch").match(pattern) for pattern in patterns)
    ]
    assert not missing, f"add to package-data in pyproject.toml: {missing}"


def test_visible_top_level():
    visible = {p.parts[0] for p in tracked() if not p.parts[0].startswith(".")}
    allowed = {
        *("megatron_patch", "examples", "toolkits", "tests", "pyproject.toml", "README.md"),
        *("LICENSE", "NOTICE", "CHANGELOG.md", "requirements.txt"),
    }
    assert visible <= allowed, f"no room for {sorted(visible - allowed)} at the top level"
    assert {"pyproject.toml", "LICENSE", "NOTICE", "CHANGELOG.md", "megatron_patch"} <= visible


def test_no_machine_of_ours_in_the_files(law):
    """Paths of a developer's machine and addresses of package registries stay out."""
    machine = re.compile(
        r"(?<![\w.])/(work|root)/|/home/\w+/|--(extra-)?index-url|pypi\.org/simple"
    )
    breaches = []
    for path in tracked():
        if path.suffix in (".json", ".png", ".bin", ".idx") or path.name == "test_packaging.py":
            continue
        text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if machine.search(line):
                breaches.append(f"{path}:{number}: {line.strip()[:100]}")
    law(breaches, "these only hold on one machine")


def test_changelog_has_a_section_for_the_supported_line():
    line = ".".join(_compat.MEGATRON_CORE_MIN.split(".")[:2])
    assert f"## Megatron-Core {line}" in (ROOT / "CHANGELOG.md").read_text()


def test_license_is_apache():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_scripts_are_executable_and_parse(law):
    breaches = []
    for path in tracked():
        if path.suffix != ".sh" and str(path) != ".ci/run":
            continue
        done = subprocess.run(["bash", "-n", ROOT / path], capture_output=True, text=True)
        if done.returncode:
            breaches.append(f"{path}: {done.stderr.strip()}")
    law(breaches, "bash cannot read these")
