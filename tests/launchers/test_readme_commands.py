"""Every command in the launchers' READMEs is run here, as a dry run where it would train."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = (
    *("qwen3", "qwen2", "qwen2_5", "llama3", "llama3_1"),
    *("deepseek_v3", "deepseek_v2", "glm4_moe", "moonlight"),
    *("mistral", "mixtral", "qwen3_next", "qwen3_5", "seed_oss", "smollm3", "gpt_oss"),
)
READMES = [ROOT / "examples" / "README.md", *(ROOT / f"examples/{f}/README.md" for f in LAUNCHED)]


def commands(readme: Path) -> list[str]:
    """Commands of the bash blocks, continuation lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", readme.read_text(), re.S)
    joined = "".join(blocks).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the capital words in the commands stand for."""
    from megatron_patch.data import demo

    folder = tmp_path_factory.mktemp("readme")
    demo.prepare(folder / "input")
    (folder / "hosts").write_text("node-a\nnode-b\n")
    lines = [json.dumps({"text": f"document {i} " * 200}) for i in range(20)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "MODEL": str(folder / "input" / "model"),
        "TEXT.jsonl": str(folder / "text.jsonl"),
        "DATA": str(folder / "mine"),
        "HOSTS": str(folder / "hosts"),
        "HOST": "node-a",
        "SMOLLM2": str(folder / "input" / "model"),
        "chats.jsonl": str(folder / "chats.jsonl"),
        "train.jsonl": str(folder / "text.jsonl"),
    }


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.parent.name)
def test_commands(readme: Path, inputs: dict[str, str], tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "MP_PYTHON": sys.executable}
    environ["PYTHONPATH"] = str(ROOT)
    found = commands(readme)
    assert found
    for text in found:
        for word, value in inputs.items():
            text = re.sub(rf"\b{re.escape(word)}(?=\b|_)", value, text)
        argv = [sys.executable if part == "python" else part for part in shlex.split(text)]
        if argv[:2] == ["megatron-patch", "generate"]:
            continue  # needs what the command before it trains
        if argv[:2] == ["sbatch", "--nodes"]:  # what Slurm would start with four nodes
            nodes, job, launcher, *flags = argv[2:]
            environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": nodes}
            environ["SLURM_JOB_NODELIST"] = f"n[1-{nodes}]"
            argv = ["bash", job, str(ROOT / launcher), *flags, "--dry-run"]
        if argv[1].startswith(("examples/", "toolkits/")):
            argv[1] = str(ROOT / argv[1])
        if "/examples/" in argv[1] and "--dry-run" not in argv:
            argv.append("--dry-run")
        done = subprocess.run(
            argv, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.parent.name)
def test_links_lead_somewhere(readme: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", readme.read_text()):
        assert (readme.parent / link).exists(), link
