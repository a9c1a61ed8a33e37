"""Conversion end to end on small models whose every number says which tensor and place it is of."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from check_family import resolve
from configs import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from safetensors.torch import load_file, save_file

from megatron_patch.convert import (
    commands,
    dist_io,
    hf_io,
    inspect,
    meta_model,
    plan,
    rules,
    stream,
    verify,
)
from megatron_patch.convert.meta_model import CheckpointLayout, checkpoint_layout
from megatron_patch.util import UserError, human_bytes

#: The reports' F1 (GQA, biases, tied), F2 (explicit head size, QK-norm, untied), F3 (experts).
MODELS: dict[str, dict[str, Any]] = {
    "f1": QWEN2,
    "f2": QWEN3,
    "f3": QWEN3_MOE,
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
}


@cache
def _layout(config: str) -> CheckpointLayout:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        return checkpoint_layout(folder)


def layout(folder: str | os.PathLike[str]) -> CheckpointLayout:
    """What Megatron-Core says, asked once a config."""
    return _layout((Path(folder) / "config.json").read_text())


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan, verify.meta_model):
        monkeypatch.setattr(module, "checkpoint_layout", layout)
    for function in (plan.plan_import, plan.plan_export):
        monkeypatch.setitem(function.__kwdefaults__, "lay_out", layout)


def encoded(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict:
    """Tensors of a config; as integers, all their numbers are different."""
    spec = resolve(config, folder)
    tensors, first = {}, 1
    for name, shape in rules.file_shapes(spec).items():
        count = torch.Size(shape).numel()
        if dtype == torch.float32:
            bits = torch.arange(first, first + count, dtype=torch.int32).view(dtype)
        else:
            generator = torch.Generator().manual_seed(first)
            bits = torch.randn(count, generator=generator).to(dtype)
        tensors[name] = bits.reshape(shape)
        first += count
    return tensors


def save(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 3) -> None:
    """As transformers saves: shards and an index."""
    names = list(tensors)
    each = -(-len(names) // shards)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * each : (number + 1) * each]
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / hf_io.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def load(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return sorted(a) == sorted(b) and all(torch.equal(bits(a[n]), bits(b[n])) for n in a)


def source(folder: Path, kind: str, **more: Any) -> Path:
    folder.mkdir(parents=True)
    save(folder, encoded(folder, MODELS[kind], **more))
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text(f'{{"{name}": 1}}')
    (folder / "pytorch_model.bin").write_bytes(b"old")
    return folder


def to_megatron(hf: Path, out: Path, *more: str) -> int:
    return commands.hf2mcore(["--input-dir", str(hf), "--output-dir", str(out), *more])


def to_hf(mcore: Path, out: Path, *more: str) -> int:
    return commands.mcore2hf(["--input-dir", str(mcore), "--output-dir", str(out), *more])


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, Path]:
    hf = source(tmp_path / "hf", "f2")
    assert to_megatron(hf, tmp_path / "mcore") == 0
    return hf, tmp_path / "mcore"


# --- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("workers", ["1", "3"])
def test_there_and_back(kind: str, workers: str, tmp_path: Path, capsys: Any) -> None:
    hf = source(tmp_path / "hf", kind)
    assert to_megatron(hf, tmp_path / "mcore", "--workers", workers) == 0
    size = ("--max-shard-size", "200KB", "--workers", workers)
    assert to_hf(tmp_path / "mcore", tmp_path / "back", *size) == 0
    assert same(load(hf), load(tmp_path / "back"))
    assert "not copied along: pytorch_model.bin" in capsys.readouterr().out
    # Only the three directories were there: tokenizer, template and generation config came along.
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (hf / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 1 and not (tmp_path / "back" / plan.RECORD).exists()
    index = json.loads((tmp_path / "back" / hf_io.INDEX).read_text())["weight_map"]
    assert set(index) == set(load(hf)) and set(index.values()) == {file.name for file in files}
    assert not list(tmp_path.glob("*.partial"))


def test_parts_on_their_own(tmp_path: Path, converted: tuple[Path, Path], capsys: Any) -> None:
    """As on several machines: each writes its part, one merges."""
    hf, _ = converted
    assert to_megatron(hf, tmp_path / "m", "--part", "2/2") == 0
    assert to_megatron(hf, tmp_path / "m", "--merge") == 2
    assert "part 1 is not written yet" in capsys.readouterr().err
    assert to_megatron(hf, tmp_path / "m", "--part", "1/2") == 0
    assert to_megatron(hf, tmp_path / "m", "--merge") == 0
    for part in ("1/3", "2/3", "3/3"):
        assert to_hf(tmp_path / "m", tmp_path / "back", "--part", part) == 0
    assert to_hf(tmp_path / "m", tmp_path / "back", "--merge") == 0
    assert same(load(hf), load(tmp_path / "back"))


def test_parts_that_start_together(tmp_path: Path, converted: tuple[Path, Path]) -> None:
    """A machine that is later by a moment neither wipes nor refuses what the first one does."""
    exported = stream.ExportJob(plan.plan_export(converted[1], max_shard=150_000))
    folder = stream.partial_of(tmp_path / "back")
    stream.write_part(exported, tmp_path / "back", 0, 2)
    before = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    assert len(before) > 3
    hf_io.create_shards(folder, exported.plan.shards)
    assert before == {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    (folder / ".conversion").rename(folder / ".conversion.partial")  # not renamed yet
    for file in folder.glob("*.safetensors"):
        file.rename(tmp_path / file.name)
    stream.write_part(exported, tmp_path / "back", 1, 2)
    for name in before:
        (tmp_path / name).unlink()
    stream.write_part(exported, tmp_path / "back", 0, 2)
    stream.merge_parts(exported, tmp_path / "back")
    assert same(load(converted[0]), load(tmp_path / "back"))


def test_a_part_that_was_begun_again_counts_no_longer(
    tmp_path: Path, converted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, _ = converted
    job, out = stream.Import(plan.plan_import(hf)), tmp_path / "m"
    for part in (0, 1):
        stream.write_part(job, out, part, 2)
    record = stream.partial_of(out) / "release" / "__1_0.distcp"
    content = record.read_bytes()
    record.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"__1_0\.distcp has \d+ bytes"):
        stream.merge_parts(job, out)
    record.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(dist_io.DistWriter, "close", lambda _: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            stream.write_part(job, out, 1, 2)
    with pytest.raises(UserError, match="part 2 is not written yet"):
        stream.merge_parts(job, out)
    stream.write_part(job, out, 1, 2)
    stream.merge_parts(job, out)
    assert verify.verify(hf, out).passed


@pytest.mark.parametrize("head", [False, True])
def test_a_tied_head_is_written_where_it_was(head: bool, tmp_path: Path) -> None:
    hf = source(tmp_path / "hf", "f1")
    if head:
        extra = {"lm_head.weight": load(hf)["model.embed_tokens.weight"].clone()}
        save(hf, load(hf) | extra)
    assert to_megatron(hf, tmp_path / "mcore") == 0
    assert to_hf(tmp_path / "mcore", tmp_path / "back") == 0
    assert same(load(hf), load(tmp_path / "back"))


def test_a_stale_tied_head_is_refused(tmp_path: Path, capsys: Any) -> None:
    hf = source(tmp_path / "hf", "f1")
    save(hf, load(hf) | {"lm_head.weight": load(hf)["model.embed_tokens.weight"] + 1})
    assert to_megatron(hf, tmp_path / "mcore") == 2
    assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err
    assert not (tmp_path / "mcore").exists()


@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["fp32", "bf16", "fp16"])
def test_dtype(given: str, wanted: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    tensors = encoded(folder, MODELS["f2"], torch.bfloat16)
    tensors = {name: (t * 1.01).to(getattr(torch, given)) for name, t in tensors.items()}
    save(folder, tensors)
    name = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[wanted]
    target = getattr(torch, name)
    assert to_megatron(folder, tmp_path / "mcore", "--dtype", wanted) == 0
    held = dist_io.read_checkpoint(tmp_path / "mcore" / stream.RELEASE)
    assert {entry.dtype for entry in held.tensors.values()} == {name}
    assert to_hf(tmp_path / "mcore", tmp_path / "back") == 0
    expected = {n: t.to(target) for n, t in tensors.items()}
    assert same(expected, load(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == name


def test_show_and_checksums_of_a_conversion(tmp_path: Path, capsys: Any) -> None:
    """Its own dtype, and no checksum is claimed for bytes that carry none."""
    hf, out = source(tmp_path / "hf", "f2", dtype=torch.bfloat16), tmp_path / "mcore"
    assert to_megatron(hf, out) == 0
    capsys.readouterr()
    assert inspect.main(["show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "of dtype        bfloat16\n" in shown and "fp32" not in shown
    assert inspect.main(["show", "--json", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["dtypes"]) == ["bfloat16"]
    assert inspect.main(["verify", str(out)]) == 0
    verdict = capsys.readouterr().out.splitlines()[0]
    assert verdict.startswith(f"PASS: {out}") and "; 0 damaged" in verdict
    (bare,) = re.findall(r"; (\S+ \S+) without a checksum", verdict)
    assert bare == human_bytes(found["dtypes"]["bfloat16"])


def test_random_bits_survive(tmp_path: Path) -> None:
    """NaNs with payloads, infinities, negative zero: bytes are bytes."""
    folder = tmp_path / "hf"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(-(1 << 15), 1 << 15, t.shape, generator=generator)
        .to(torch.int16)
        .view(torch.bfloat16)
        for name, t in encoded(folder, MODELS["f3"]).items()
    }
    save(folder, tensors)
    assert to_megatron(folder, tmp_path / "mcore", "--workers", "2") == 0
    assert to_hf(tmp_path / "mcore", tmp_path / "back") == 0
    assert same(tensors, load(tmp_path / "back"))


def test_the_files_of_an_export_do_not_depend_on_the_workers(
    tmp_path: Path, converted: tuple[Path, Path]
) -> None:
    for workers in ("1", "4"):
        arguments = ("--workers", workers, "--max-shard-size", "150KB")
        assert to_hf(converted[1], tmp_path / workers, *arguments) == 0
    for file in (tmp_path / "1").iterdir():
        assert file.read_bytes() == (tmp_path / "4" / file.name).read_bytes()


def test_large_tensors_become_several_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = source(tmp_path / "hf", "f3")
    monkeypatch.setattr(dist_io, "CHUNK", 20_000)
    monkeypatch.setattr(dist_io, "FILE", 100_000)
    assert to_megatron(hf, tmp_path / "mcore") == 0
    held = dist_io.read_checkpoint(tmp_path / "mcore" / stream.RELEASE)
    assert len(held.tensors["embedding.word_embeddings.weight"].chunks) > 10
    assert len(list((tmp_path / "mcore" / stream.RELEASE).glob("*.distcp"))) > 5
    assert to_hf(tmp_path / "mcore", tmp_path / "back") == 0
    assert same(load(hf), load(tmp_path / "back"))


def test_transformers_loads_the_export(tmp_path: Path, converted: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    assert to_hf(converted[1], tmp_path / "back") == 0
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_dry_run_reads_no_weights(tmp_path: Path, capsys: Any) -> None:
    hf = source(tmp_path / "hf", "f3")
    expected = load(hf)
    for file in hf.glob("*.safetensors"):  # holes in place of the data
        header = file.read_bytes()[: 8 + int.from_bytes(file.read_bytes()[:8], "little")]
        size = file.stat().st_size
        file.write_bytes(header)
        os.truncate(file, size)
    assert to_megatron(hf, tmp_path / "mcore", "--dry-run") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in expected)
    assert "mlp.experts.experts.linear_fc1.weight[7]" in out and "GroupedQKV" in out
    assert not (tmp_path / "mcore").exists() and not list(tmp_path.glob("*.partial"))


MEASURED = """
import resource, sys
from pathlib import Path
from megatron_patch.convert import plan, stream
import torch, torch.distributed.checkpoint
sys.path.insert(0, "tests/models")
import test_convert
torch.arange(10).sum()
hf, out, back = map(Path, sys.argv[1:4])
dtype = sys.argv[4] if len(sys.argv) > 4 else None
layout = test_convert.layout(hf)
imported = plan.plan_import(hf, dtype, lay_out=lambda _: layout)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
stream.convert(stream.Import(imported), out, 1)
exported = plan.plan_export(out, hf, dtype, lay_out=lambda _: layout)
stream.convert(stream.ExportJob(exported), back, 1)
print(peak() - before, torch.cuda.is_initialized(), torch.distributed.is_initialized())
assert "megatron" not in sys.modules and "transformers" not in sys.modules
"""


@pytest.mark.parametrize("dtype", ["", "float32"])
def test_memory_does_not_grow_with_the_tensors(dtype: str, tmp_path: Path, root: Path) -> None:
    """A model of 300 MB with tensors of 140 MB passes through a few MB."""
    hf = tmp_path / "hf"
    hf.mkdir()
    config = QWEN3 | {"vocab_size": 550_001, "hidden_size": 128}
    save(hf, {n: t.to(torch.bfloat16) for n, t in encoded(hf, config).items()})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, hf, tmp_path / "m", tmp_path / "b",
         *filter(None, [dtype])],
        capture_output=True, text=True, cwd=root, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown, cuda, groups = done.stdout.split()[-3:]
    assert int(grown) < 24 << 20, grown
    assert (cuda, groups) == ("False", "False")


# --- refusals ----------------------------------------------------------------------------------


def _cut(hf: Path) -> str:
    file = hf / "model-00002-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    return "model-00002-of-00003.safetensors has"


def _cut_header(hf: Path) -> str:
    os.truncate(hf / "model-00002-of-00003.safetensors", 5)
    return "model-00002-of-00003.safetensors (5 bytes) is cut off"


def _lose(hf: Path) -> str:
    (hf / "model-00003-of-00003.safetensors").unlink()
    return "model-00003-of-00003.safetensors is missing"


def _wrong_index(hf: Path) -> str:
    index = json.loads((hf / hf_io.INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    (hf / hf_io.INDEX).write_text(json.dumps(index))
    return "holds model.norm.weight, but model.safetensors.index.json places it in"


def _index_of_more(hf: Path) -> str:
    index = json.loads((hf / hf_io.INDEX).read_text())
    index["weight_map"]["model.more"] = "model-00001-of-00003.safetensors"
    (hf / hf_io.INDEX).write_text(json.dumps(index))
    return "lacks model.more"


def _no_index(hf: Path) -> str:
    (hf / hf_io.INDEX).unlink()
    return "3 safetensors files and no model.safetensors.index.json"


def _only_bin(hf: Path) -> str:
    for file in (*hf.glob("*.safetensors"), hf / hf_io.INDEX):
        file.unlink()
    return "it holds pytorch_model.bin; save the model as safetensors"


def _gap(hf: Path) -> str:
    tensors = load(hf)
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    save(hf, tensors)
    return "lacks 1 tensors (model.layers.1.self_attn.k_norm.weight)"


def _leftover(hf: Path) -> str:
    save(hf, load(hf) | {"model.layers.3.mlp.up_proj.weight": torch.ones(96, 64)})
    return "1 tensors too many (model.layers.3.mlp.up_proj.weight)"


def _shape(hf: Path) -> str:
    tensors = load(hf)
    tensors["model.embed_tokens.weight"] = torch.ones(1024, 64)
    save(hf, tensors)
    return "model.embed_tokens.weight is [1024, 64], but config.json says [1000, 64]"


def _mixed(hf: Path) -> str:
    tensors = load(hf)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    save(hf, tensors)
    return "Choose it with --dtype"


@pytest.mark.parametrize(
    "damage",
    [_cut, _cut_header, _lose, _wrong_index, _index_of_more, _no_index, _only_bin, _gap,
     _leftover, _shape, _mixed],
)  # fmt: skip
def test_a_damaged_source_is_refused(damage: Any, tmp_path: Path, capsys: Any) -> None:
    hf = source(tmp_path / "hf", "f2")
    message = damage(hf)
    assert to_megatron(hf, tmp_path / "mcore") == 2
    assert message in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def test_what_stands_there_stays(tmp_path: Path, converted: tuple[Path, Path], capsys: Any) -> None:
    hf, mcore = converted
    assert to_megatron(hf, mcore) == 2
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("")
    assert to_megatron(hf, tmp_path / "out") == 2
    assert "holds files of something else" in capsys.readouterr().err
    assert (tmp_path / "out.partial" / "mine").exists()


def test_a_small_disk_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    hf = source(tmp_path / "hf", "f2")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(hf_io.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert to_megatron(hf, tmp_path / "mcore") == 2
    assert "1000 B are free on that disk" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def _step(mcore: Path) -> Path:
    return mcore / stream.RELEASE


def _cut_record(mcore: Path) -> str:
    file = _step(mcore) / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    return "__0_0.distcp has"


def _lose_record(mcore: Path) -> str:
    (_step(mcore) / "__0_0.distcp").unlink()
    return "__0_0.distcp is missing"


def _no_metadata(mcore: Path) -> str:
    (_step(mcore) / ".metadata").unlink()
    return "copy the directory with it"


def _bad_metadata(mcore: Path) -> str:
    (_step(mcore) / ".metadata").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    return ".metadata: cannot be read"


def _no_format(mcore: Path) -> str:
    (_step(mcore) / "metadata.json").unlink()
    return "an interrupted save, or a torch_dcp or fsdp_dtensor checkpoint"


def _zarr(mcore: Path) -> str:
    (_step(mcore) / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    return "saved as 'zarr'"


def _old_format(mcore: Path) -> str:
    shutil.rmtree(_step(mcore))
    (_step(mcore) / "mp_rank_00").mkdir(parents=True)
    return "--ckpt-convert-format torch_dist"


def _tracker(mcore: Path) -> str:
    (mcore / "latest_checkpointed_iteration.txt").write_text("7")
    return "names '7', but there is no"


def _no_config(mcore: Path) -> str:
    shutil.rmtree(mcore / "hf")
    return "Name the original Hugging Face directory with --hf-dir"


def _other_config(mcore: Path) -> str:
    config = json.loads((mcore / "hf" / "config.json").read_text())
    (mcore / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return "[3, 64], but config.json says [2, 64]"


@pytest.mark.parametrize(
    "damage",
    [_cut_record, _lose_record, _no_metadata, _bad_metadata, _no_format, _zarr, _old_format,
     _tracker, _no_config, _other_config],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused(
    damage: Any, tmp_path: Path, converted: tuple[Path, Path], capsys: Any
) -> None:
    message = damage(converted[1])
    assert to_hf(converted[1], tmp_path / "back") == 2
    assert message in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "mcore"]
    assert not Path("hacked").exists()


def test_flags(tmp_path: Path, capsys: Any) -> None:
    for argv, words in (
        (["--input-dir", "a"], "--output-dir"),
        (["--input_dir", "a", "--load", "b", "--output-dir", "c"], "are the same setting"),
        (["--input-dir", "a", "--output-dir", "c", "--workers", "0"], "--workers 0"),
        (["--input-dir", "a", "--output-dir", "c", "--part", "3/2"], "--part 3/2"),
        (["--input-dir", "a", "--output-dir", "c", "--tp", "2"], "--tp"),
        (["--input-dir", "a", "--output-dir", "c", "--dtype", "int4"], "int4"),
        (["--input-dir", str(tmp_path / "a"), "--output-dir", "c"], "no such directory"),
    ):
        assert commands.hf2mcore(argv) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(UserError, match="5 bananas"):
        hf_io.parse_size("5 bananas", "--max-shard-size")
    assert hf_io.parse_size("1.5GB", "") == 1_500_000_000 and hf_io.parse_size("2GiB", "") == 2**31


def test_model_type(tmp_path: Path, converted: tuple[Path, Path], capsys: Any) -> None:
    argv = ["--input-dir", str(converted[1]), "--output-dir", str(tmp_path / "back")]
    assert commands.mcore2hf([*argv, "--model-type", "llama"], model_type=True) == 2
    assert "says 'qwen3'" in capsys.readouterr().err
    assert commands.mcore2hf([*argv, "--model-type", "qwen3"], model_type=True) == 0


# --- interruptions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT, signal.SIGKILL]
)
def test_interrupted(how: signal.Signals, tmp_path: Path) -> None:
    """Nothing that looks complete remains, and the same command again starts clean."""
    hf = tmp_path / "hf"
    hf.mkdir()
    big = QWEN3 | {"vocab_size": 600_000, "hidden_size": 256}
    save(hf, encoded(hf, big))
    code = (
        "import sys, time; from megatron_patch.convert import commands, dist_io\n"
        "append = dist_io.DistWriter._append\n"
        "def slow(self, block): append(self, block); time.sleep(0.02)\n"
        "dist_io.DistWriter._append = slow\n"
        "sys.exit(commands.hf2mcore(sys.argv[1:]))"
    )
    argv = ["--input-dir", str(hf), "--output-dir", str(tmp_path / "mcore")]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *argv],
        # A shell's background job inherits an ignored SIGINT, which Python would keep.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    partial = tmp_path / "mcore.partial"
    deadline = time.monotonic() + 120
    while not any(partial.glob("release/*.distcp")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    assert process.wait(30) != 0
    assert not (tmp_path / "mcore").exists()
    assert partial.exists() == (how is signal.SIGKILL)
    assert not list(tmp_path.rglob(".metadata")) and not list(tmp_path.rglob("latest*"))
    assert commands.hf2mcore(argv) == 0
    assert not partial.exists() and (tmp_path / "mcore" / "release" / ".metadata").exists()


def test_a_failing_worker_ends_all(
    tmp_path: Path, converted: tuple[Path, Path], capsys: Any
) -> None:
    """Data that goes wrong after the plan was made: the worker's words reach the user."""
    _, mcore = converted
    exported = plan.plan_export(mcore)
    os.truncate(mcore / "release" / "__0_0.distcp", 1000)
    with pytest.raises(UserError, match=r"__0_0\.distcp"):
        stream.convert(stream.ExportJob(exported), tmp_path / "back", 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "mcore"]


# --- verify ------------------------------------------------------------------------------------


def run_verify(hf: Path, mcore: Path, capsys: Any, *more: str) -> tuple[int, str]:
    capsys.readouterr()
    status = commands.verify(["--hf-dir", str(hf), "--mcore-dir", str(mcore), *more])
    return status, capsys.readouterr().out


def change(hf: Path, edit: Any) -> Path:
    """A copy of the directory with other tensors."""
    other = hf.parent / "changed"
    shutil.copytree(hf, other)
    tensors = load(hf)
    edit(tensors)
    save(other, tensors)
    return other


def _swap(tensors: dict[str, torch.Tensor]) -> str:
    a, b = (f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 2))
    tensors[a], tensors[b] = tensors[b], tensors[a]
    return "model.layers.0.mlp.down_proj.weight"


def _swap_inside(tensors: dict[str, torch.Tensor]) -> str:
    a, b = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "kv")
    tensors[a], tensors[b] = tensors[b], tensors[a]
    return "model.layers.1.self_attn.k_proj.weight"


def _expert_twice(tensors: dict[str, torch.Tensor]) -> str:
    for part in ("gate", "up", "down"):
        name = f"model.layers.2.mlp.experts.{{}}.{part}_proj.weight"
        tensors[name.format(5)] = tensors[name.format(4)].clone()
    return "model.layers.2.mlp.experts.5.gate_proj.weight"


def _no_bias(tensors: dict[str, torch.Tensor]) -> str:
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    return "model.layers.1.self_attn.k_proj.bias: missing from the Hugging Face files"


def _padding(tensors: dict[str, torch.Tensor]) -> str:
    name = "model.embed_tokens.weight"
    tensors[name] = torch.cat([tensors[name], torch.zeros(24, tensors[name].shape[1])])
    return f"{name}: is [1024, 64] in"


def _last_bit(tensors: dict[str, torch.Tensor]) -> str:
    tensors["model.norm.weight"].view(torch.int32)[-1] ^= 1
    return "model.norm.weight: first at row 63, 1 rows differ"


@pytest.mark.parametrize(
    ("kind", "edit"),
    [("f2", _swap), ("f2", _swap_inside), ("f3", _expert_twice), ("f1", _no_bias),
     ("f1", _padding), ("f2", _last_bit)],
)  # fmt: skip
def test_verify_names_what_differs(kind: str, edit: Any, tmp_path: Path, capsys: Any) -> None:
    hf = source(tmp_path / "hf", kind)
    assert to_megatron(hf, tmp_path / "mcore") == 0
    status, out = run_verify(hf, tmp_path / "mcore", capsys)
    assert status == 0 and "PASS" in out and "0 differ" in out
    words: list[str] = []
    other = change(hf, lambda tensors: words.append(edit(tensors)))
    status, out = run_verify(other, tmp_path / "mcore", capsys)
    assert status == 1 and "FAIL" in out
    assert f"first difference: {words[0]}" in out


def _storage(mcore: Path, edit: Any) -> None:
    """Change which record stands where in a checkpoint."""
    path = _step(mcore) / dist_io.METADATA
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _records_swapped(metadata: Any) -> str:
    places = metadata.storage_data
    first, last = (
        next(i for i in places if i.fqn.endswith("linear_fc2.weight") and i.offset[0] == layer)
        for layer in (0, 2)
    )
    places[first], places[last] = places[last], places[first]
    return "model.layers.0.mlp.down_proj.weight"


def _expert_stored_twice(metadata: Any) -> str:
    places = metadata.storage_data
    key = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"
    for index in [i for i in places if i.fqn == key and i.offset[0] == 5]:
        (four,) = (i for i in places if i.fqn == key and i.offset == (4, *index.offset[1:]))
        places[index] = places[four]
    return "model.layers.2.mlp.experts.5.gate_proj.weight"


def _bias_lost(metadata: Any) -> str:
    key = "decoder.layers.self_attention.linear_qkv.bias"
    del metadata.state_dict_metadata[key]
    metadata.storage_data = {i: r for i, r in metadata.storage_data.items() if i.fqn != key}
    names = (f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv")
    return f"{' + '.join(names)}: {key} is missing from the Megatron checkpoint"


@pytest.mark.parametrize(
    ("kind", "edit"),
    [("f2", _records_swapped), ("f3", _expert_stored_twice), ("f1", _bias_lost)],
)
def test_verify_names_what_differs_in_the_checkpoint(
    kind: str, edit: Any, tmp_path: Path, capsys: Any
) -> None:
    hf, mcore = source(tmp_path / "hf", kind), tmp_path / "mcore"
    assert to_megatron(hf, mcore) == 0
    words: list[str] = []
    _storage(mcore, lambda metadata: words.append(edit(metadata)))
    status, out = run_verify(hf, mcore, capsys)
    assert status == 1 and f"first difference: {words[0]}" in out


def test_verify_sees_a_leak_of_padding_in_the_checkpoint(
    tmp_path: Path, converted: tuple[Path, Path], capsys: Any
) -> None:
    hf, mcore = converted
    held = dist_io.read_checkpoint(mcore / "release")
    (chunk,) = held.tensors["output_layer.weight"].chunks
    with dist_io.Files() as files:
        data = dist_io._find_data(files, chunk.record, "")
    with chunk.record.path.open("r+b") as handle:
        handle.seek(data.offset + 1000 * 64 * 4)  # the first padded row
        handle.write(b"\1\0\0\0")
    status, out = run_verify(hf, mcore, capsys)
    assert status == 1
    assert "first difference: lm_head.weight: first at row 1000" in out


def test_verify_across_dtypes_and_report(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save(folder, {n: t.float() * 1.01 for n, t in encoded(folder, QWEN2, torch.bfloat16).items()})
    assert to_megatron(folder, tmp_path / "mcore", "--dtype", "bf16") == 0
    report = tmp_path / "report.json"
    status, out = run_verify(folder, tmp_path / "mcore", capsys, "--report", str(report))
    assert status == 0
    assert "compared as bfloat16: the files are float32, the checkpoint is bfloat16" in out
    found = json.loads(report.read_text())
    assert found["passed"] and set(found["tensors"]) == set(load(folder))
    assert all(entry["hf"] == entry["megatron"] for entry in found["tensors"].values())


# --- what is kept of Megatron-Core's answers ---------------------------------------------------


def test_a_kept_layout_is_of_this_model_these_versions_and_these_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its file is looked for changes with everything that it follows from."""
    from megatron_patch import _compat
    from megatron_patch.models import registry

    def place(**changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(QWEN3 | changes))
        return meta_model._kept(tmp_path)

    found = [place(), place(num_hidden_layers=4), place(tie_word_embeddings=True)]
    assert place() == found[0], "the same question has the same answer"
    with monkeypatch.context() as patch:
        version = _compat.installed_version
        for changed in ("megatron-core", "torch"):
            patch.setattr(
                _compat, "installed_version", lambda n, c=changed: "9" if n == c else version(n)
            )
            found.append(place())
    package = tmp_path / "megatron_patch"
    shutil.copytree(Path(meta_model.__file__).parents[1], package)
    monkeypatch.setattr(meta_model, "__file__", str(package / "convert" / "meta_model.py"))
    assert place() == found[0], "the same sources elsewhere"
    for changed in ("models/qwen3.py", "convert/rules.py"):
        with (package / changed).open("a") as file:
            file.write("#\n")
        found.append(place())
    outside = tmp_path / "outside.py"
    outside.write_text("")
    monkeypatch.setattr(registry, "sources", lambda name: (outside,))
    found.append(place())
    outside.write_text("#")
    found.append(place())
    assert len(set(found)) == len(found)


def test_a_family_outside_is_found_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    from megatron_patch.models import registry

    (tmp_path / "its_family").mkdir()
    for name in ("__init__.py", "family.py"):
        (tmp_path / "its_family" / name).write_text("")
    (tmp_path / "one_file.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    entries = [
        EntryPoint("a", "its_family.family:FAMILY", registry.ENTRY_POINTS),
        EntryPoint("b", "one_file:FAMILY", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: entries)
    assert [path.name for path in registry.sources("a")] == ["__init__.py", "family.py"]
    assert registry.sources("b") == (tmp_path / "one_file.py",)
    assert registry.sources("qwen3") == ()


def test_a_damaged_kept_answer_is_asked_for_again(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    meta_model._keep(kept, {"tensors": {}, "objects": [], "runs": {}})
    assert meta_model._read_kept(kept) == {"tensors": {}, "objects": [], "runs": {}}
    content = kept.read_bytes()
    for damaged in (content[:-2], content.replace(b"objects", b"objectz"), b""):
        kept.write_bytes(damaged)
        assert meta_model._read_kept(kept) is None
    assert meta_model._read_kept(tmp_path / "none") is None


def test_a_plan_needs_no_torch_where_the_layout_is_kept(tmp_path: Path, root: Path) -> None:
    hf = source(tmp_path / "hf", "f2")
    code = (
        "import sys; from megatron_patch.convert import plan\n"
        "made = plan.plan_import(sys.argv[1]); print(len(made.steps), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(hf)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.split() == ["27", "False"]
