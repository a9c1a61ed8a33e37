"""What Megatron-Core would save for a model: every checkpoint key, with its place in the whole.

The model is built without data (on torch's meta device), for one rank and without process groups,
and asked for its ``sharded_state_dict``. That takes seconds and a gigabyte of imports, so
`checkpoint_layout` does it in a process of its own, which sees no GPU and is gone before the first
weight is read, and keeps the answer in ``$XDG_CACHE_HOME/megatron_patch/layouts``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.convert import rows
from megatron_patch.util import UserError, atomic_write

if TYPE_CHECKING:
    from megatron_patch.models.family import ModelSpec

#: Packages that Megatron-Core imports where it finds them, for attention kernels, tokenizers and
#: exports; a layout needs none of them, and they take longer to import than all the rest.
_NOT_NEEDED = ("fla", "transformers")

#: What `sharded_state_dict` is told in training too (`training/checkpointing.py:
#: _build_sharded_state_dict_metadata`); stored with a checkpoint as its content metadata.
CONTENT_METADATA = (("singleton_local_shards", False), ("chained_optim_avoid_prefix", True))


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of the model stands in the checkpoint.

    Attributes:
        key: Checkpoint key. Layers of the same kind share one, and so do experts.
        global_shape: Shape of everything under the key.
        offset: Where this tensor starts in it, one number a dimension.
        shape: The tensor's own shape; its axes are the last ones of ``global_shape``.
        cuts: Row numbers at which Megatron-Core starts a new chunk (gate and up are two).
        pieces: Where a tensor stands under several keys, one after another in its rows (the input
            projection of Gated DeltaNet); ``key`` is then none of the checkpoint's.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    cuts: tuple[int, ...] = (0,)
    pieces: tuple[Place, ...] = ()

    @property
    def parts(self) -> tuple[Place, ...]:
        """The pieces, or the place itself where there is one key."""
        return self.pieces or (self,)


@dataclass(frozen=True)
class CheckpointLayout:
    """Everything that a checkpoint of a model's weights consists of.

    Attributes:
        tensors: Name in the state dict -> its place.
        objects: Unique keys of bookkeeping entries (``..._extra_state/shard_0_4``).
    """

    tensors: dict[str, Place]
    objects: tuple[str, ...]


def checkpoint_layout(hf_dir: str | os.PathLike[str]) -> CheckpointLayout:
    """Ask Megatron-Core, in a process without GPU; the answer is kept for the next time.

    That process also finds which rows the weight rules move where, so that nobody else needs torch
    for a plan (`rows.know_runs`).

    Args:
        hf_dir: Directory with ``config.json``.

    Raises:
        UserError: Megatron-Core refuses the model or is not usable; the end of its output is in
            the message.
    """
    path = _kept(hf_dir)
    answer = _read_kept(path)
    if answer is None:
        answer = _ask(hf_dir)
        _keep(path, answer)
    rows.know_runs(answer["runs"])
    return CheckpointLayout(
        {name: _place(*fields) for name, fields in answer["tensors"].items()},
        tuple(answer["objects"]),
    )


#: Answers that are kept; the ones used last.
_MOST_KEPT = 64


def _kept(hf_dir: str | os.PathLike[str]) -> Path:
    """Where the layout of a model is kept.

    The name stands for everything that a layout follows from: the resolved model, the sources of
    this package, and the versions of what they build on.
    """
    import hashlib
    import platform

    from megatron_patch import _compat
    from megatron_patch.models.registry import get_family, load_config, sources

    hf = load_config(Path(hf_dir))
    spec = get_family(hf.model_type).resolve(hf)
    digest = hashlib.sha256()
    for part in (
        json.dumps(dataclasses.asdict(spec), sort_keys=True, default=repr),
        platform.python_version(),
        *(f"{name} {_compat.installed_version(name)}" for name in ("megatron-core", "torch")),
        str(importlib.util.find_spec("megatron")),
    ):
        digest.update(part.encode() + b"\0")
    package = Path(__file__).resolve().parents[1]
    for source in (*sorted(package.rglob("*.py")), *sources(hf.model_type)):
        name = str(source.relative_to(package)) if package in source.parents else str(source)
        digest.update(name.encode() + b"\0" + source.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "megatron_patch" / "layouts" / f"{digest.hexdigest()[:40]}.json"


def _read_kept(path: Path) -> Any:
    """What `_keep` wrote; None where there is nothing, or anything else."""
    import hashlib

    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != digest:
            return None
        os.utime(path)
    except OSError:
        return None
    return json.loads(content)


def _keep(path: Path, answer: Any) -> None:
    """Keep an answer, by rename; a folder that cannot be written to costs time, nothing else."""
    import hashlib

    content = json.dumps(answer).encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        kept = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in kept[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)


def _ask(hf_dir: str | os.PathLike[str]) -> Any:
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        # Nothing is compiled, and loading the compiler takes a second.
        "TORCH_COMPILE_DISABLE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__, str(hf_dir)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate()
    if process.returncode:
        tail = "\n".join((errors.strip() or output.strip()).splitlines()[-8:])
        raise UserError(f"Megatron-Core could not lay out the model of {hf_dir}:\n{tail}")
    # Imports print; the answer is the last line.
    return json.loads(output.splitlines()[-1])


def _place(key: str, *numbers: Any) -> Place:
    *sizes, pieces = numbers
    shape, offset, own, cuts = map(tuple, sizes)
    return Place(key, shape, offset, own, cuts, tuple(_place(*fields) for fields in pieces))


def parse_model(spec: ModelSpec, **more: Any) -> argparse.Namespace:
    """Megatron's own parser and validation on a model's arguments, for one CPU rank.

    Args:
        spec: The resolved model.
        **more: Further argument dests, which win.
    """
    from megatron.training.arguments import add_megatron_arguments, validate_args

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    run = {
        "micro_batch_size": 1,
        "seq_length": spec.args["max_position_embeddings"],
        "transformer_impl": "transformer_engine",
        "use_cpu_initialization": True,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "train_iters": 1,
        "lr": 1e-3,
    }
    parser.set_defaults(**{**run, **spec.args, **more})
    args = parser.parse_args([])
    args.rank, args.world_size, args.local_rank = 0, 1, 0
    validate_args(args)
    return args


class _Alone:
    """A process group of one rank, without a process group."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def _state_dict(spec: ModelSpec) -> dict[str, Any]:
    """`sharded_state_dict` of the model on the meta device."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_patch.training.model import model_config

    for kind in ("tensor", "pipeline", "expert"):
        getattr(parallel_state, f"set_{kind}_model_parallel_rank")(0)
        getattr(parallel_state, f"set_{kind}_model_parallel_world_size")(1)
    config = model_config(parse_model(spec), spec)
    config.transformer.init_model_with_meta_device = True
    config.transformer.perform_initialization = False
    alone = _Alone()
    fields = dataclasses.fields(ProcessGroupCollection)
    groups = ProcessGroupCollection(**{field.name: alone for field in fields})
    with torch.device("meta"):
        builder = config.get_builder_cls()(config)
        model = builder.build_model(groups, pre_process=True, post_process=True)
        state: dict[str, Any] = model.sharded_state_dict(
            metadata={**dict(CONTENT_METADATA), "dp_cp_group": alone}
        )
    return state


def _places(state: dict[str, Any]) -> CheckpointLayout:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    tensors: dict[str, Place] = {}
    objects = []
    for name, entry in state.items():
        if isinstance(entry, ShardedObject):
            objects.append(entry.unique_key)
            continue
        shards = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        keys = [list(group) for _, group in groupby(shards, key=lambda shard: shard.key)]
        pieces = tuple(_one_key(name, group) for group in keys)
        tensors[name] = pieces[0]
        if len(pieces) > 1:
            rows = sum(piece.shape[0] for piece in pieces)
            shape = (rows, *pieces[0].shape[1:])
            tensors[name] = Place(entry.key, shape, (0,) * len(shape), shape, (0,), pieces)
    return CheckpointLayout(tensors, tuple(objects))


def _one_key(name: str, shards: list[Any]) -> Place:
    """The place of chunks under one key, which follow one another in the rows."""
    first = shards[0]
    axis = len(first.global_shape) - len(first.local_shape)
    cuts, rows = [], 0
    for shard in shards:
        expected = list(first.global_offset)
        if len(shard.local_shape):
            expected[axis] += rows
        if list(shard.global_offset) != expected:
            raise UserError(f"{name}: its shards do not follow one another: {shards}")
        cuts.append(rows)
        rows += shard.local_shape[0] if len(shard.local_shape) else 1
    shape = (rows, *first.local_shape[1:]) if len(first.local_shape) else ()
    return Place(
        first.key,
        tuple(first.global_shape),
        tuple(first.global_offset),
        tuple(shape),
        tuple(cuts),
    )


def main(argv: list[str]) -> int:
    """The process of its own: one JSON line on standard output."""
    from megatron_patch.models.registry import get_family, load_config
    from megatron_patch.platform import cpu, torch_backend

    (directory,) = argv
    hf = load_config(directory)
    spec = get_family(hf.model_type).resolve(hf)
    sys.argv = sys.argv[:1]
    if all(layer.attention in ("gqa", "mla") for layer in spec.layers):
        for package in _NOT_NEEDED:
            sys.modules[package] = None  # type: ignore[assignment]  # Python's way to say: absent
    cpu.enable()
    torch_backend.enable()
    layout = _places(_state_dict(spec))
    operations = (
        (rule.operation, tuple(map(rows.rows_of, rule.shapes)))
        for rule in get_family(spec.family).rules(spec)
    )
    runs = rows.known_runs(operations)
    tensors = {name: dataclasses.astuple(place) for name, place in layout.tensors.items()}
    print()
    print(json.dumps({"tensors": tensors, "objects": layout.objects, "runs": runs}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(str(error))
