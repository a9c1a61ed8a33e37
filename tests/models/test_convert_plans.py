"""Plans of the largest models, from their published configurations and headers alone.

The files are as large as the real ones and empty (sparse): a plan that read weights would take
hours. Names are written out here, as they stand in the published index, by no rule of the library.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.convert import hf_io

ROOT = Path(__file__).resolve().parents[2]


def saved(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor in the published files."""
    c, hidden, heads = config, config["hidden_size"], config["num_attention_heads"]
    inner = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield f"{name}.weight", (rows, columns), "float8_e4m3fn"
        blocks = (-(-rows // 128), -(-columns // 128))
        yield f"{name}.weight_scale_inv", blocks, "float32"

    def mlp(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield from linear(f"{name}.gate_proj", width, hidden)
        yield from linear(f"{name}.up_proj", width, hidden)
        yield from linear(f"{name}.down_proj", hidden, width)

    yield "model.embed_tokens.weight", (c["vocab_size"], hidden), "bfloat16"
    layers = c["num_hidden_layers"]
    for number in range(layers + c["num_nextn_predict_layers"]):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        yield from linear(f"{attention}.q_a_proj", c["q_lora_rank"], hidden)
        yield f"{attention}.q_a_layernorm.weight", (c["q_lora_rank"],), "bfloat16"
        yield from linear(f"{attention}.q_b_proj", heads * inner, c["q_lora_rank"])
        low = c["kv_lora_rank"]
        yield from linear(f"{attention}.kv_a_proj_with_mqa", low + c["qk_rope_head_dim"], hidden)
        yield f"{attention}.kv_a_layernorm.weight", (low,), "bfloat16"
        both = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
        yield from linear(f"{attention}.kv_b_proj", both, low)
        yield from linear(f"{attention}.o_proj", hidden, heads * c["v_head_dim"])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (hidden,), "bfloat16"
        if number < c["first_k_dense_replace"]:
            yield from mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        experts = c["n_routed_experts"]
        yield f"{layer}.mlp.gate.weight", (experts, hidden), "bfloat16"
        yield f"{layer}.mlp.gate.e_score_correction_bias", (experts,), "float32"
        for expert in range(experts):
            yield from mlp(f"{layer}.mlp.experts.{expert}", c["moe_intermediate_size"])
        width = c["moe_intermediate_size"] * c["n_shared_experts"]
        yield from mlp(f"{layer}.mlp.shared_experts", width)
        if number >= layers:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{layer}.{name}.weight", (hidden,), "bfloat16"
            yield f"{layer}.eh_proj.weight", (hidden, 2 * hidden), "bfloat16"
            for name in ("embed_tokens", "shared_head.head"):
                yield f"{layer}.{name}.weight", (c["vocab_size"], hidden), "bfloat16"
    yield "model.norm.weight", (hidden,), "bfloat16"
    yield "lm_head.weight", (c["vocab_size"], hidden), "bfloat16"


#: Runs the command and says the peak memory of its largest process in kilobytes. Not `ru_maxrss` of
#: the command itself, which counts what the forking process had before `exec`.
MEASURED = """
import resource, sys
from megatron_patch import cli
status = cli.call("convert", sys.argv[1:])
lines = open("/proc/self/status").read().splitlines()
own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(max(own, children), file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensors", "parameters", "seconds"),
    [
        # 91,991 names: as many as in the published index.
        ("deepseek-v3", 91_991, "683B", 45),
        ("kimi-k2", None, "1.03T", 90),
    ],
)
def test_plan(
    name: str, tensors: int | None, parameters: str, seconds: float, tmp_path: Path
) -> None:
    text = (ROOT / "tests/fixtures/configs" / f"{name}.json").read_text()
    every = list(saved(json.loads(text)))
    assert tensors is None or len(every) == tensors
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text(text)
    shards, targets = hf_io.plan_shards(every, 5 * 10**9)
    hf_io.create_shards(hf, shards)
    hf_io.write_index(hf, targets)
    argv = ["hf2mcore", "--input-dir", str(hf), "--output-dir", str(tmp_path / "out"), "--dry-run"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = time.monotonic()
    with (tmp_path / "plan.txt").open("w") as sink:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *argv],
            stdout=sink,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    took = time.monotonic() - started
    lines = (tmp_path / "plan.txt").read_text().splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    kilobytes = int(done.stderr.split()[-1])
    assert f"{parameters} parameters" in lines[-1]
    named = [n for line in lines if " -> " in line for n in line.partition(" -> ")[0].split(" + ")]
    skipped = [re.match(r"skipped: (\S+),", line) for line in lines]
    named += [found[1] for found in skipped if found]
    weights = [n for n, _, _ in every if not n.endswith("_scale_inv")]
    assert sorted(named) == sorted(weights), "every weight stands in the plan once"
    print(f"{name}: {len(every)} tensors, {took:.1f} s, {kilobytes / 1e6:.2f} GB")
    assert kilobytes < 2_000_000
    assert took < seconds
