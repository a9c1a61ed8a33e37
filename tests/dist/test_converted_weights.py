"""Converted checkpoints in training: every layout loads them, and the first loss is transformers'.

Upstream's loader reads what `convert` wrote, on forked ranks, through the training entry point and
`--init-from`. Every sequence of the corpus is the same, so the first batch is known, whatever the
data's order.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_patch.convert import commands, dist_io
from megatron_patch.data.idxmap import Writer
from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.unit.checkpoints import bookkeeping_forms, change_bookkeeping

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import configs

SEQUENCE = 64

MODELS: dict[str, dict[str, Any]] = {
    # Tied, biases, padded vocabulary; head_dim other than hidden / heads, QK-norm; experts.
    "qwen2": configs.QWEN2 | {"num_hidden_layers": 4},
    "qwen3": configs.QWEN3 | {"num_hidden_layers": 4},
    "moe": configs.QWEN3_MOE | {"num_hidden_layers": 4, "mlp_only_layers": [1]},
    "moe-stacked": configs.QWEN3_MOE | {"num_hidden_layers": 2, "mlp_only_layers": []},
    # Latent attention, groups of experts, biases of routers, MTP on the last stage.
    "deepseek-v3": configs.DEEPSEEK_V3 | {"num_hidden_layers": 2, "n_routed_experts": 8},
    "deepseek-v2": configs.DEEPSEEK_V2 | {"num_hidden_layers": 2, "q_lora_rank": None},
    "glm4": configs.GLM4_MOE | {"num_hidden_layers": 2},
    # A window in every layer; other names for experts; a shared expert with a gate.
    "mistral": configs.MISTRAL,
    "mixtral": configs.MIXTRAL,
    # Layers without rotation, which a stage has to count from the model's first.
    "smollm3": configs.SMOLLM3,
    "qwen2-moe": configs.QWEN2_MOE,
    # Gated DeltaNet, whose projections have several keys in a checkpoint.
    "qwen3-next": configs.QWEN3_NEXT,
    # Four projections of Gated DeltaNet, MTP after a layer of another kind.
    "qwen3.5": configs.QWEN3_5 | {"num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen3.5-moe": configs.QWEN3_5_MOE | {"num_hidden_layers": 2, "full_attention_interval": 2},
    # Sinks, biases, windows in every other layer, all experts of a layer in one tensor.
    "gpt-oss": configs.GPT_OSS
    | {"num_hidden_layers": 2, "layer_types": None, "output_router_logits": False},
}

#: The bias would move in the step that is trained.
STILL = ("--moe-router-bias-update-rate", "0")

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "dp2": (2, ()),
    "tp2": (2, ("--tp", "2")),
    "pp2": (2, ("--pp", "2")),
    "pp2-vpp2": (2, ("--pp", "2", "--vpp", "2")),
    "ep2": (2, ("--ep", "2")),
    "tp2-etp2": (2, ("--tp", "2", "--etp", "2")),
}

#: Model, layout, and whether training reads the Hugging Face files themselves.
CASES = [
    pytest.param("qwen2", "tp2", False, marks=pytest.mark.slow),
    ("qwen2", "pp2", True),
    ("qwen3", "one", False),
    ("qwen3", "tp2", True),
    ("qwen3", "dp2", True),
    pytest.param("qwen3", "pp2-vpp2", False, marks=pytest.mark.slow),
    ("moe", "ep2", True),
    ("moe", "tp2-etp2", False),
    pytest.param("moe", "pp2-vpp2", True, marks=pytest.mark.slow),
    pytest.param("moe-stacked", "tp2", False, marks=pytest.mark.slow),
    ("moe-stacked", "ep2", True),
    pytest.param("deepseek-v3", "pp2", True, marks=pytest.mark.slow),
    ("deepseek-v3", "tp2-etp2", True),
    pytest.param("deepseek-v3", "ep2", False, marks=pytest.mark.slow),
    pytest.param("deepseek-v2", "tp2", True, marks=pytest.mark.slow),
    pytest.param("deepseek-v2", "ep2", False, marks=pytest.mark.slow),
    pytest.param("glm4", "pp2", True, marks=pytest.mark.slow),
    ("glm4", "tp2-etp2", False),
    ("mistral", "tp2", False),
    pytest.param("mixtral", "ep2", True, marks=pytest.mark.slow),
    ("smollm3", "pp2", True),
    pytest.param("smollm3", "tp2", False, marks=pytest.mark.slow),
    pytest.param("qwen2-moe", "pp2", True, marks=pytest.mark.slow),
    ("qwen2-moe", "tp2-etp2", True),
    pytest.param("qwen3-next", "pp2", False, marks=pytest.mark.slow),
    ("qwen3-next", "tp2-etp2", True),
    pytest.param("qwen3.5", "tp2", False, marks=pytest.mark.slow),
    pytest.param("qwen3.5", "pp2", True, marks=pytest.mark.slow),
    pytest.param("qwen3.5-moe", "tp2-etp2", True, marks=pytest.mark.slow),
    pytest.param("qwen3.5-moe", "ep2", False, marks=pytest.mark.slow),
    ("gpt-oss", "tp2", True),
    pytest.param("gpt-oss", "pp2", True, marks=pytest.mark.slow),
    pytest.param("gpt-oss", "ep2", True, marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Converted:
    hf: Path
    mcore: Path
    corpus: Path
    loss: float
    args: dict[str, Any]
    tensors: dict[str, np.ndarray]


def tensors(ranks: RankServer, source: Path, scratch: Path) -> dict[str, np.ndarray]:
    ranks.run("tests.dist.jobs:load_tensors", 1, scratch, source=str(source))
    state = torch.load(scratch / "tensors.pt", weights_only=True)
    return {name: value.float().numpy() for name, value in state.items()}


@pytest.fixture(scope="module")
def converted(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random transformers model, saved by transformers and converted; made when asked for."""
    made: dict[str, Converted] = {}

    def get(kind: str) -> Converted:
        if kind not in made:
            made[kind] = convert(ranks, MODELS[kind], tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


def convert(ranks: RankServer, config: dict[str, Any], folder: Path) -> Converted:
    """A random model of a config, converted; the first loss is transformers'."""
    from check_family import add_around_mtp, random_hf_model, resolve

    spec = resolve(config, folder / "config")
    model = random_hf_model(folder / "config", len(spec.mtp))
    model.save_pretrained(folder / "hf", max_shard_size="300KB")
    add_around_mtp(spec, folder / "hf")
    assert len(list((folder / "hf").glob("*.safetensors"))) > 1
    rng = np.random.default_rng(3)
    document = rng.integers(0, config["vocab_size"], SEQUENCE)
    with Writer(str(folder / "corpus"), np.dtype(np.uint16)) as writer:
        for _ in range(60):
            writer.write(document, np.array([SEQUENCE]), np.array([1]))
        writer.commit()
    ids = torch.from_numpy(document)[None]
    with torch.no_grad():
        logits = model(ids).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, ids[0].roll(-1)).item()
    status = commands.hf2mcore(
        ["--input-dir", str(folder / "hf"), "--output-dir", str(folder / "mcore"), "--workers", "2"]
    )
    assert status == 0
    held = tensors(ranks, folder / "mcore" / "release", folder / "plain")
    return Converted(folder / "hf", folder / "mcore", folder / "corpus", loss, spec.args, held)


@pytest.mark.parametrize(("kind", "layout", "directly"), CASES)
def test_training_starts_from_it(
    kind: str, layout: str, directly: bool, ranks: RankServer, converted: Any, tmp_path: Path
) -> None:
    start = converted(kind)
    world, more = LAYOUTS[layout]
    more += ("--save-hf", "last") if layout == "pp2" else ()
    argv = flags(start, tmp_path / "run", start.hf if directly else start.mcore, *more)
    if directly:
        result = ranks.run("tests.dist.entry_jobs:reading", world, tmp_path / "job", argv=argv)
        read = sum(value.pop("bytes") for value in result.values)
        held = sum(file.stat().st_size for file in start.hf.glob("*.safetensors"))
        assert held * 0.9 < read < 1.1 * held
        # Beside the weights, a few looks at the headers, in blocks of the file buffer.
        assert all(value.pop("headers") < held for value in result.values)
        log = result.logs[0].read_text()
        assert f"> weights of {start.hf}: " in log and "Params for bucket" not in log
    else:
        result = ranks.run(
            "tests.dist.jobs:train", world, tmp_path / "job", argv=argv, weights=True
        )
    assert result.values == [{"status": 0}] * world
    (first,) = metrics.read(tmp_path / "run")
    assert first["lm loss"] == pytest.approx(start.loss, rel=2e-6)
    weights = tensors(ranks, tmp_path / "job" / "weights", tmp_path / "w")
    assert sorted(weights) == sorted(n for n in start.tensors if not n.endswith("expert_bias"))
    for name, value in weights.items():
        assert np.array_equal(value, start.tensors[name]), name
    _exports(start, tmp_path, layout)


def flags(start: Converted, output: Path, weights: Path, *more: str) -> list[str]:
    """One step that changes nothing, from converted weights or from the files themselves."""
    return [
        *("--hf-model", str(start.hf), "--data-path", str(start.corpus)),
        *("--output-dir", str(output), "--init-from", str(weights)),
        *("--seq-length", str(SEQUENCE), "--micro-batch-size", "1", "--global-batch-size", "4"),
        *("--train-iters", "1", "--lr", "1e-30", "--min-lr", "0", "--warmup-steps", "0"),
        *("--optimizer", "sgd", "--no-use-distributed-optimizer", "--no-overlap-param-gather"),
        *("--weight-decay", "0", *more),
        *(STILL if "moe_router_enable_expert_bias" in start.args else ()),
    ]


def test_a_file_cut_off_while_it_is_read(ranks: RankServer, converted: Any, tmp_path: Path) -> None:
    start = converted("qwen3")
    shutil.copytree(start.hf, tmp_path / "hf")
    victim = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    argv = flags(start, tmp_path / "run", tmp_path / "hf", "--tp", "2")
    result = ranks.run(
        "tests.dist.entry_jobs:reading", 2, tmp_path / "job", argv=argv, cut=str(victim)
    )
    assert [value["status"] for value in result.values] == [2, 2]
    for log in result.logs:
        words = log.read_text()
        assert f"error: {victim} ends at byte" in words and "Traceback" not in words


LOST = "decoder.layers.self_attention.linear_proj.weight"


def _other_bookkeeping(start: Converted, folder: Path, drop: str = "") -> Path:
    shutil.copytree(start.mcore, folder)
    forms = change_bookkeeping(folder / "release", drop)
    assert set(forms.values()) == set(bookkeeping_forms())
    return folder


def test_any_form_of_bookkeeping_is_read(ranks: RankServer, converted: Any, tmp_path: Path) -> None:
    start = converted("qwen3")
    mcore = _other_bookkeeping(start, tmp_path / "mcore")
    where = ["--input-dir", str(mcore), "--output-dir", str(tmp_path / "back")]
    assert commands.mcore2hf(where) == 0
    given, back = load_tensors(start.hf), load_tensors(tmp_path / "back")
    assert sorted(given) == sorted(back)
    assert all(torch.equal(given[name], back[name]) for name in given)
    assert commands.verify(["--hf-dir", str(start.hf), "--mcore-dir", str(mcore)]) == 0
    argv = flags(start, tmp_path / "run", mcore)
    result = ranks.run("tests.dist.jobs:train", 1, tmp_path / "job", argv=argv)
    assert result.values == [{"status": 0}]
    (first,) = metrics.read(tmp_path / "run")
    assert first["lm loss"] == pytest.approx(start.loss, rel=2e-6)
    assert "load_return" not in result.logs[0].read_text(), "the load was strict"


def test_a_lost_weight_is_named(
    ranks: RankServer, converted: Any, tmp_path: Path, capsys: Any
) -> None:
    start = converted("qwen3")
    mcore = _other_bookkeeping(start, tmp_path / "mcore", LOST)
    where = ["--input-dir", str(mcore), "--output-dir", str(tmp_path / "back")]
    assert commands.mcore2hf(where) == 2
    assert f"lacks 1 tensors ({LOST})" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
    assert commands.verify(["--hf-dir", str(start.hf), "--mcore-dir", str(mcore)]) == 1
    assert f"{LOST} is missing from the Megatron checkpoint" in capsys.readouterr().out
    argv = flags(start, tmp_path / "run", mcore)
    result = ranks.run("tests.dist.jobs:train", 1, tmp_path / "job", argv=argv)
    assert result.values == [{"status": 2}]
    assert f"the checkpoint lacks 1 that the model has: {LOST}" in result.logs[0].read_text()


def load_tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _exports(start: Converted, folder: Path, layout: str) -> None:
    """What the run saved, optimizer states beside, is the HF model again, bit for bit."""
    checkpoints = folder / "run" / "checkpoints"
    held = dist_io.read_checkpoint(dist_io.find_checkpoint(checkpoints))
    assert any(key.startswith("optimizer.") for key in held.tensors)
    down = next(
        e for k, e in held.tensors.items() if k.endswith("self_attention.linear_proj.weight")
    )
    narrow = any(chunk.sizes[-1] != down.shape[-1] for chunk in down.chunks)
    assert narrow == layout.startswith("tp2"), "columns are split over ranks under TP"
    output = folder / "run" / "hf"
    if not output.exists():  # the run was not asked for it
        output = folder / "back"
        argv = ["--input-dir", str(folder / "run"), "--output-dir", str(output)]
        assert commands.mcore2hf([*argv, "--workers", "2"]) == 0
    given, back = load_tensors(start.hf), load_tensors(output)
    assert (output / "config.json").exists()
    assert sorted(given) == sorted(back)
    for name, tensor in given.items():
        assert torch.equal(tensor, back[name]), name
