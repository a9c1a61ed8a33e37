"""Preflight: what a plan means on every rank, whether it can run, and which layout to take.

``megatron-patch check FLAGS`` answers on a laptop in well under a second: no GPU, no torch, no
megatron. :func:`check` collects refusals (each with both numbers and the remedy) instead of
stopping at the first. :func:`auto_layout` serves ``--parallel auto``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch import _compat
from megatron_patch.data import blend
from megatron_patch.models.hf_config import largest_token
from megatron_patch.models.registry import get_family
from megatron_patch.models.rope import is_plain
from megatron_patch.training import memory, sinks
from megatron_patch.training.args import (
    AUTO,
    COMMAND_LINE,
    EVALUATION_OFF,
    Plan,
    help_text,
    resolve,
)
from megatron_patch.training.flags import DEVICES, FP8_RECIPES, flag_name
from megatron_patch.training.memory import Memory, Sizes, Traffic
from megatron_patch.util import UserError, column, human_bytes, human_count

if TYPE_CHECKING:
    from megatron_patch.models.family import ModelSpec

GIB = 2**30

#: Sustained bf16 TFLOP/s of training, NVLink and network GB/s a GPU: orders of magnitude that only
#: rank layouts against each other.
SPEED: dict[str, tuple[float, float, float]] = {
    "a100": (180.0, 240.0, 25.0),
    "h100": (400.0, 360.0, 45.0),
    "h200": (400.0, 360.0, 45.0),
    "b200": (800.0, 720.0, 45.0),
}

#: Above this share of the device the estimate is too close to call.
TIGHT = 0.92


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of :func:`check`.

    Attributes:
        refusals: Why the run cannot start; empty where it can.
        warnings: What a user should know before it starts.
        layout: Sizes and what a rank gets.
        run: Run length in all four units, tokens a step.
        parameters: Parameters in all, active for a token, on the fullest rank.
        memory: Stage with the highest total, or None where the split is impossible.
        stages: Memory of all stages.
        limit: Bytes of the device, or None where unknown.
        traffic: Communication a rank and step, or None.
        device: Device planned for.
    """

    refusals: tuple[str, ...]
    warnings: tuple[str, ...]
    layout: dict[str, Any]
    run: dict[str, Any]
    parameters: dict[str, int]
    memory: Memory | None
    stages: tuple[Memory, ...]
    limit: int | None
    traffic: Traffic | None
    device: str

    @property
    def ok(self) -> bool:
        """Whether the run may start."""
        return not self.refusals

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form; memory and traffic in bytes."""

        def one(memory_: Memory) -> dict[str, int]:
            return {
                **dataclasses.asdict(memory_),
                "allocated": memory_.allocated,
                "total": memory_.total,
            }

        return {
            "ok": self.ok,
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
            "device": self.device,
            "layout": self.layout,
            "run": self.run,
            "parameters": self.parameters,
            "memory": {
                "limit": self.limit,
                "worst": one(self.memory) if self.memory else None,
                "stages": [one(m) for m in self.stages],
            },
            "traffic": dataclasses.asdict(self.traffic) if self.traffic else None,
        }


# --- refusals ---------------------------------------------------------------------------------


def sequence_multiple(recipe: str | None, tp: int, cp: int, sequence_parallel: bool) -> int:
    """What a sequence (or a padded packed sequence) must be a multiple of.

    Context parallelism cuts ``2 cp`` pieces, sequence parallelism ``tp`` more, and with FP8 the
    piece of each rank must be whole blocks: the least common multiple of all, not the largest.

    Args:
        recipe: A name of ``--fp8`` or None.
        tp: Tensor parallel size.
        cp: Context parallel size.
        sequence_parallel: Whether the sequence is split over TP as well.
    """
    spread = tp if sequence_parallel else 1
    block = FP8_RECIPES[recipe][2] if recipe else 1
    return math.lcm(2 * cp if cp > 1 else 1, cp * spread * block)


def _divisors(number: int, most: int = 64) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def _shape(values: Mapping[str, Any]) -> Iterator[str]:
    """Sizes without which nothing can be said."""
    for dest in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if not values[dest]:
            hint = "give --hf-model DIR" if dest != "seq_length" else "for example 4096"
            yield f"{flag_name(dest)} is missing: {hint}"
    if not values["padded_vocab_size"]:
        yield "--padded-vocab-size is missing: give --hf-model DIR"


def _layout_refusals(values: Mapping[str, Any], world: int) -> Iterator[str]:
    """Divisibility of ranks, batch, heads, experts, layers and vocabulary."""
    sizes = Sizes.of(values, world)
    tp, pp, cp, ep, etp = sizes.tp, sizes.pp, sizes.cp, sizes.ep, sizes.etp
    if world % (tp * pp * cp):
        yield (
            f"{world} ranks do not divide by --tp {tp} x --pp {pp} x --cp {cp} = {tp * pp * cp}; "
            f"use {math.ceil(world / (tp * pp * cp)) * tp * pp * cp} ranks (--nproc-per-node, "
            f"--nnodes) or a layout whose product is one of {_divisors(world)}"
        )
    elif world % (ep * etp * pp):
        yield (
            f"{world} ranks do not divide by --ep {ep} x --etp {etp} x --pp {pp} = "
            f"{ep * etp * pp}; use --ep one of {_divisors(world // math.gcd(world, etp * pp))}"
        )
    heads = values["num_attention_heads"]
    if heads % tp:
        yield f"{heads} attention heads do not divide by --tp {tp}; use --tp one of " + str(
            _divisors(heads)
        )
    groups = values["num_query_groups"]
    if values["group_query_attention"] and groups % tp and tp % groups:
        yield (
            f"{groups} key/value heads and --tp {tp}: one must divide the other; use --tp one of "
            f"{_divisors(math.gcd(heads, groups))}"
        )
    moe = memory.moe_layers(values)
    if not all(moe) and values["ffn_hidden_size"] and values["ffn_hidden_size"] % tp:
        yield (
            f"--ffn-hidden-size {values['ffn_hidden_size']} does not divide by --tp {tp}; use --tp "
            f"one of {_divisors(values['ffn_hidden_size'])}"
        )
    experts = values["num_experts"]
    if experts and experts % ep:
        yield f"{experts} experts do not divide by --ep {ep}; use --ep one of " + str(
            _divisors(experts)
        )
    width = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"]
    if experts and width and width % etp:
        yield (
            f"experts of width {width} do not divide by --etp {etp}; use --etp one of "
            f"{_divisors(width)}"
        )
    if experts and etp > 1 and values["add_bias_linear"]:
        yield (
            f"this model's experts have biases, which Megatron-Core has with --etp 1 only, not "
            f"{etp}; use --etp 1, and --ep to spread experts over ranks"
        )
    if experts and tp > 1 and not values["sequence_parallel"]:
        yield (
            f"a mixture of experts with --tp {tp} needs sequence parallelism, which is off; drop "
            "--no-sequence-parallel or use --tp 1"
        )
    vocabulary = values["padded_vocab_size"]
    if vocabulary % tp:
        yield (
            f"a vocabulary of {vocabulary} rows does not divide by --tp {tp}; use --tp one of "
            f"{_divisors(vocabulary)} or --padded-vocab-size {math.ceil(vocabulary / tp) * tp}"
        )
    try:
        memory.stages(values)
    except UserError as problem:
        yield str(problem)


def _batch_refusals(values: Mapping[str, Any], world: int) -> Iterator[str]:
    """Batch and sequence."""
    sizes = Sizes.of(values, world)
    batch, micro = values["global_batch_size"], values["micro_batch_size"]
    if batch and batch % (micro * sizes.dp):
        least = micro * sizes.dp
        up, down = math.ceil(batch / least) * least, batch // least * least
        options = f"{down} or {up}" if down else str(up)
        yield (
            f"--global-batch-size {batch} does not divide by --micro-batch-size {micro} x "
            f"{sizes.dp} data-parallel ranks = {least}; use --global-batch-size {options}"
        )
    vpp = memory.virtual_stages(values)
    if batch and vpp > 1 and sizes.pp > 1:
        steps = batch // (micro * sizes.dp)
        if steps % sizes.pp:
            yield (
                f"the interleaved schedule (--vpp {vpp}) needs micro batches in multiples of --pp "
                f"{sizes.pp}, but a step has {steps}; use --global-batch-size "
                f"{math.ceil(max(steps, 1) / sizes.pp) * sizes.pp * micro * sizes.dp}"
            )
    length = values["seq_length"]
    recipe = _recipe(values)
    multiple = sequence_multiple(recipe, sizes.tp, sizes.cp, bool(values["sequence_parallel"]))
    if length % multiple:
        parts = [f"2 x --cp {sizes.cp}"] if sizes.cp > 1 else []
        parts += [f"--tp {sizes.tp} (sequence parallel)"] if values["sequence_parallel"] else []
        parts += [f"blocks of {FP8_RECIPES[recipe][2]} for --fp8 {recipe}"] if recipe else []
        yield (
            f"--seq-length {length} is not a multiple of {multiple} ({', '.join(parts)}); use "
            f"--seq-length {math.ceil(length / multiple) * multiple}"
        )
    most = values["max_position_embeddings"]
    if most is None:
        yield f"--max-position-embeddings is missing: at least --seq-length {length} is needed"
    elif length > most:
        yield (
            f"--seq-length {length} is longer than the model's max_position_embeddings {most}; "
            f"use --seq-length {most}, or --max-position-embeddings {length} where the model is "
            "meant to learn longer positions"
        )


def _recipe(values: Mapping[str, Any]) -> str | None:
    if not values["fp8"]:
        return None
    recipe = values["fp8_recipe"]
    return recipe if recipe in FP8_RECIPES else None


def _device_refusals(plan: Plan) -> Iterator[str]:
    """What the device cannot do."""
    values, device = plan.values, plan.device
    capability = _capability(device)
    recipe = _recipe(values)
    if recipe and device != "cpu" and capability:
        low, high = FP8_RECIPES[recipe][3], FP8_RECIPES[recipe][4]
        if capability < low or (high and capability > high):
            usable = [
                name
                for name, (_, _, _, least, most) in FP8_RECIPES.items()
                if capability >= least and not (most and capability > most)
            ]
            wanted = f"{low[0]}.{low[1]}" + (f" to {high[0]}.{high[1]}" if high else " or newer")
            yield (
                f"--fp8 {recipe} needs compute capability {wanted}, {device} has "
                f"{capability[0]}.{capability[1]}; "
                + (f"use --fp8 {usable[0]}" if usable else "train in bf16")
            )
    if recipe:
        block = FP8_RECIPES[recipe][2]
        sizes = Sizes.of(values, plan.world_size)
        for name, width, multiple in _fp8_widths(values, sizes, block):
            if width % multiple:
                yield (
                    f"--fp8 {recipe} works on blocks of {multiple}, but the {name} is {width}; use "
                    "a smaller --tp or another recipe"
                )
    if not plan.environment.te:
        for dest in ("moe_grouped_gemm", "moe_permute_fusion", "apply_rope_fusion"):
            if plan.given(dest) and values[dest]:
                yield f"{flag_name(dest)} needs Transformer Engine, which this run does without"
    if values["linear_attention_freq"] and find_spec("fla") is None:
        yield (
            "Gated DeltaNet layers need flash-linear-attention: pip install 'megatron-patch[fla]' "
            "(or flash-linear-attention)"
        )
    if values["linear_attention_freq"]:
        ranks = values["tensor_model_parallel_size"] * values["context_parallel_size"]
        for dest in ("linear_num_key_heads", "linear_num_value_heads"):
            if values[dest] % ranks:
                yield (
                    f"{dest} {values[dest]} does not divide by --tp x --cp = {ranks}, over which "
                    f"Gated DeltaNet's heads are spread; use a smaller --tp or --cp"
                )
    if plan.environment.te and values["context_parallel_size"] > 1:
        how = values["cp_comm_type"]
        every = how if isinstance(how, list) else [how]
        special = [
            what
            for what, there in (
                ("a sliding window", values["window_size"] is not None),
                ("attention sinks", values["softmax_type"] != "vanilla"),
            )
            if there
        ]
        if special and any(kind != "a2a" for kind in every):
            yield (
                f"this model has {' and '.join(special)}, which Transformer Engine's context "
                f"parallelism has only with --cp-comm-type a2a; add it"
            )
    if recipe and not plan.environment.te and device != "cpu":
        yield f"--fp8 {recipe} needs Transformer Engine, which this run does without; train in bf16"
    if values["bf16"] and capability and capability < (8, 0):
        yield f"bf16 needs compute capability 8.0, {device} has {capability}; use --precision fp16"


def _fp8_widths(
    values: Mapping[str, Any], sizes: Sizes, block: int
) -> Iterator[tuple[str, int, int]]:
    """(name, width, what it must be a multiple of) of a rank's matrices that run in FP8."""
    yield "hidden size", values["hidden_size"], block
    yield "MLP width a rank", (values["ffn_hidden_size"] or 0) // sizes.tp, block
    if values["num_experts"]:
        width = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"] or 0
        yield "width of an expert a rank", width // sizes.etp, block
    if values["kv_channels"] and not values["multi_latent_attention"]:
        # Not whole blocks: only the rows that matrix units take at a time.
        heads = values["num_attention_heads"]
        groups = values["num_query_groups"] if values["group_query_attention"] else heads
        least = 32 if block == 32 else 16
        query = values["kv_channels"] * heads // sizes.tp
        keys = 2 * values["kv_channels"] * max(1, groups // sizes.tp)
        yield "width of all heads a rank", query, least
        yield "width of queries, keys and values a rank", query + keys, least


#: Accepted by Megatron's parser and read by nothing on this path: attention is causal over the
#: whole sequence, positions are those of the sequence, and the data is plain token streams.
_IGNORED = (
    "reset_attention_mask",
    "reset_position_ids",
    "create_attention_mask_in_dataloader",
    "dataloader_inter_document_masking",
    "fim_data",
    "sft",
    "test_mode",
    "per_dataset_sequences_path",
    "dataloader_fast_cache_load",
)
_ROPE_FLAGS = [
    "position_embedding_type",
    "rope_scaling_factor",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
]


#: The rope of latent attention, written into the model from its config after building.
_LATENT_ROPE_FLAGS = ["mscale", "mscale_all_dim", "rope_type", "rotary_scaling_factor"]


def _model_refusals(plan: Plan, model: ModelSpec) -> Iterator[str]:
    """Settings that contradict the model of --hf-model."""
    values = plan.values
    further = values["mtp_num_layers"] or 0
    if further != len(model.mtp):
        yield (
            f"--mtp-num-layers {further}, but config.json says {len(model.mtp)} "
            f"({get_family(model.family).mtp_key}): change it there, so that weights and exports "
            f"agree"
        )
    if model.groups_by_best is not None:
        for dest in ("moe_router_fusion", "moe_enable_routing_replay"):
            if values[dest]:
                yield (
                    f"{flag_name(dest)} knows Megatron-Core's rule for groups of experts only, "
                    f"which is not this model's; drop it"
                )
    if values["mla_down_proj_fusion"] and values["q_lora_rank"] is None:
        yield "--mla-down-proj-fusion has nothing to fuse: queries have no low rank; drop it"


def _effect_refusals(plan: Plan) -> Iterator[str]:
    """Settings of the user's that would change nothing."""
    values = plan.values
    dense = not values["num_experts"]
    if dense:
        idle = [d for d in values if plan.given(d) and d.startswith("moe_")]
        idle += [
            d
            for d in ("expert_model_parallel_size", "expert_tensor_parallel_size")
            if plan.given(d) and values[d] != 1
        ]
        for dest in idle:
            yield f"{flag_name(dest)} has no effect: the model has no experts; drop it"
    for dest in _IGNORED:
        if plan.given(dest) and values[dest]:
            yield f"{flag_name(dest)} has no effect in pretraining here; drop it"
    if plan.model is not None:
        fixed = ["vocab_size", "make_vocab_size_divisible_by"]
        if not is_plain(plan.model.rope):
            fixed += _ROPE_FLAGS
        if values["multi_latent_attention"]:
            fixed += _LATENT_ROPE_FLAGS
        yield from _model_refusals(plan, plan.model)
        for dest in fixed:
            if plan.given(dest):
                yield (
                    f"{flag_name(dest)} has no effect: config.json of --hf-model decides; "
                    "change it there"
                )
    if memory.virtual_stages(values) > 1 and values["pipeline_model_parallel_size"] == 1:
        yield (
            f"--vpp {memory.virtual_stages(values)} has no effect with --pp 1: there is no "
            "pipeline to interleave; drop it or raise --pp"
        )
    if (
        plan.given("sequence_parallel")
        and values["sequence_parallel"]
        and values["tensor_model_parallel_size"] == 1
    ):
        yield "--sequence-parallel has no effect with --tp 1; drop it or raise --tp"
    if plan.device == "cpu":
        for given, flag in (
            (plan.own.cpu_offloading, "--cpu-offloading"),
            (plan.own.cpu_offloading_optimizer, "--cpu-offloading-optimizer"),
            (bool(values["fp8"]), "--fp8"),
            (plan.own.gpu_memory is not None, "--gpu-memory"),
        ):
            if given:
                yield f"{flag} has no effect on CPU ranks; drop it"
        for dest in ("use_torch_fsdp2", "use_megatron_fsdp", "record_memory_history"):
            if values[dest]:
                yield f"{flag_name(dest)} needs GPUs; drop it"
        if values["profile"] and not values["use_pytorch_profiler"]:
            yield "--profile marks a window for nsys, which needs GPUs; add --use-pytorch-profiler"
        if plan.own.flight_recorder is not None:
            yield "--flight-recorder is about NCCL, which CPU ranks do without; drop it"
    width = values["kv_channels"] or 0
    if width % 2 and values["position_embedding_type"] == "rope":
        yield f"--kv-channels {width}: rope turns pairs, so an even number is needed"
    if values["phase_transition_iterations"] and not values["train_samples"]:
        yield "--phase-transition-iterations needs --train-samples and a batch that stays as it is"
    if plan.given("recompute_num_layers") and values["recompute_granularity"] != "full":
        yield "--recompute-num-layers has no effect without --recompute-granularity full"
    if plan.given("recompute_modules") and values["recompute_granularity"] != "selective":
        yield "--recompute-modules has no effect without --recompute-granularity selective"
    if values["recompute_granularity"] == "full" and not (
        values["recompute_method"] and values["recompute_num_layers"]
    ):
        yield (
            "--recompute-granularity full needs --recompute-method uniform|block and "
            "--recompute-num-layers N; use --recompute-method uniform --recompute-num-layers 1"
        )
    off = values["eval_iters"] == 0 and plan.source["eval_iters"] != EVALUATION_OFF
    if plan.given("eval_interval") and off:
        yield (
            f"--eval-interval {values['eval_interval']} has no effect: evaluation is off "
            "(--eval-iters 0); give --eval-iters N and validation data"
        )
    if values["profile"] and not plan.own.output_dir:
        yield "--profile: traces go to the run directory; add --output-dir"
    if plan.own.flight_recorder is not None and not plan.own.output_dir:
        yield "--flight-recorder: dumps go to the run directory; add --output-dir"
    if plan.own.swanlab_exp_name and not plan.own.swanlab_project:
        yield "--swanlab-exp-name has no effect without --swanlab-project"
    trackers = plan.values["wandb_project"] or plan.own.swanlab_project
    if trackers and not plan.own.output_dir:
        yield f"figures go to {trackers} from the run directory; add --output-dir"
    if plan.given("min_lr") and values["lr"] is not None and values["min_lr"] > values["lr"]:
        yield f"--min-lr {values['min_lr']:g} is above --lr {values['lr']:g}; lower it"
    yield from _between_checkpoints(values)


def _between_checkpoints(values: Mapping[str, Any]) -> Iterator[str]:
    """What upstream needs for checkpoints that the next one replaces."""
    interval, kind = values["non_persistent_save_interval"], values["non_persistent_ckpt_type"]
    if interval and kind is None:
        yield (
            f"--non-persistent-save-interval {interval} needs --non-persistent-ckpt-type global, "
            "which keeps the newest of them in --non-persistent-global-ckpt-dir or beside the "
            "checkpoints"
        )
    if kind not in (None, "global", "local"):
        yield f"--non-persistent-ckpt-type {kind}: Megatron-Core writes global and local ones only"
    if kind == "local":
        if not values["non_persistent_local_ckpt_dir"]:
            yield "--non-persistent-ckpt-type local needs --non-persistent-local-ckpt-dir DIR"
        if find_spec("nvidia_resiliency_ext") is None:
            yield (
                "--non-persistent-ckpt-type local needs nvidia-resiliency-ext (pip install "
                "nvidia-resiliency-ext); --non-persistent-ckpt-type global needs nothing"
            )


def _offload_refusals(plan: Plan) -> Iterator[str]:
    """Limits of upstream's activation offloading."""
    values = plan.values
    moved = values["cpu_offloading_num_layers"]
    if not moved:
        return
    flag = "--cpu-offloading" if plan.own.cpu_offloading else "--cpu-offloading-num-layers"
    if values["num_layers"] and moved >= values["num_layers"]:
        yield (
            f"{flag}: {moved} of {values['num_layers']} layers; at most "
            f"{values['num_layers'] - 1} can be moved"
        )
    if values["pipeline_model_parallel_size"] > 1:
        pp = values["pipeline_model_parallel_size"]
        yield f"{flag} works with --pp 1 only, not --pp {pp}; use --tp, --cp or recomputation"
    if values["recompute_granularity"]:
        yield (
            f"{flag} and --recompute-granularity {values['recompute_granularity']} exclude each "
            "other; keep one of them"
        )


#: FlashAttention's generations: version -> distribution, as Transformer Engine looks for them.
_FLASH = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
#: Variables by which Transformer Engine is told what it may use -> the backends that leave it on.
_TE_SWITCHES = {
    "NVTE_FLASH_ATTN": ("auto", "flash"),
    "NVTE_FUSED_ATTN": ("auto", "fused"),
    "NVTE_UNFUSED_ATTN": ("auto", "unfused"),
}


def _attention_refusals(plan: Plan) -> Iterator[str]:
    """An attention backend that cannot run here, as far as packages and settings tell."""
    values, te = plan.values, plan.environment.te
    asked, version = values["attention_backend"], values["flash_attention_version"]
    flag = f"--attention-backend {asked}"
    if asked == "local":
        yield (
            f"{flag} is for Megatron-Core's local layers, which are not used here; for the "
            "attention of torch give --backend torch"
        )
    if asked == "fused" and plan.device == "cpu":
        yield f"{flag} is cuDNN's, which needs a GPU; drop it"
    if version and not (te and asked == "flash"):
        yield (
            f"--flash-attention-version {version} has no effect "
            + ("without Transformer Engine; drop it" if not te else "")
            + ("without --attention-backend flash: cuDNN is preferred; add it" if te else "")
        )
    if not te or plan.environment.assumed:
        return
    wanted = [_FLASH[version]] if version in _FLASH else list(_FLASH.values())
    if asked == "flash" and not any(map(_compat.installed_version, wanted)):
        yield (
            f"{flag} needs {' or '.join(wanted)}, which is not installed; install it, or leave the "
            "flag out (cuDNN's fused attention)"
        )
    for name, backends in _TE_SWITCHES.items():
        expected = str(int(asked in backends))
        if os.environ.get(name, expected) != expected:
            yield (
                f"the environment has {name}={os.environ[name]}, but {flag} asks for {expected}; "
                "unset it and choose by --attention-backend"
            )


def _learning(plan: Plan) -> Iterator[str]:
    if plan.values["lr"] is None and not plan.values["skip_train"]:
        yield "--lr is missing: the peak learning rate, for example 3e-4"


def _capability(device: str) -> tuple[int, int] | None:
    if device in DEVICES:
        return DEVICES[device][1]
    probed = probe_gpu() if device == "cuda" else None
    return probed[1] if probed else None


@functools.cache
def probe_gpu() -> tuple[int, tuple[int, int], str] | None:
    """Memory in bytes, compute capability and name of this machine's smallest GPU, or None.

    Asks ``nvidia-smi``: no torch, no CUDA context.
    """
    try:
        answer = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=memory.total,compute_cap,name",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        ).stdout
        rows = [[part.strip() for part in row.split(",", 2)] for row in answer.splitlines() if row]
        total, capability, name = min(rows, key=lambda row: float(row[0]))
        major, minor = capability.split(".")
        return int(float(total) * 2**20), (int(major), int(minor)), name
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def host_memory() -> int | None:
    """Bytes of this machine's memory; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))


def device_memory(plan: Plan) -> int | None:
    """Bytes of memory that one rank may use, or None where it cannot be known here."""
    if plan.own.gpu_memory:
        return int(plan.own.gpu_memory * GIB)
    if plan.device in DEVICES:
        return int(DEVICES[plan.device][0] * GIB)
    if plan.device == "cpu":
        total = host_memory()
        if total is None:
            return None
        local = plan.own.gpus_per_node or plan.world_size // (plan.own.nodes or 1) or 1
        return int(total / local)
    probed = probe_gpu()
    return probed[0] if probed else None


# --- check ------------------------------------------------------------------------------------


def check(plan: Plan, *, trust_memory: bool = True, start: bool = False) -> Report:
    """Everything that can be said before the first GPU second.

    Args:
        plan: A resolved plan.
        trust_memory: Refuse what the estimate says does not fit; False: warn only, for a run that
            will find out.
        start: The run starts here and now: without its data it is refused, not warned about.

    Returns:
        The report; its refusals are complete as far as one does not hide another.
    """
    values = plan.values
    refusals = list(_shape(values))
    if values["num_layers"]:
        for pattern in (memory.moe_layers, memory.linear_layers):
            try:
                pattern(values)
            except UserError as problem:
                refusals.append(str(problem))
    warnings: list[str] = []
    limit = device_memory(plan)
    if refusals:
        return Report(tuple(refusals), (), {}, _run(plan), {}, None, (), limit, None, plan.device)
    problems: list[str] = []
    try:
        problems += _layout_refusals(values, plan.world_size)
        problems += _batch_refusals(values, plan.world_size)
        problems += _device_refusals(plan)
        problems += _effect_refusals(plan)
        micro = values["micro_batch_size"]
        if plan.own.sft and micro > 1:
            problems.append(
                f"packed sequences take --micro-batch-size 1, not {micro}: a micro batch is one "
                "pack; use a longer --seq-length instead, or --per-device-train-batch-size (so "
                "many packs, one after the other)"
            )
    except UserError as problem:
        problems.append(str(problem))
    problems += _offload_refusals(plan)
    problems += _attention_refusals(plan)
    problems += _learning(plan)
    refusals += dict.fromkeys(problems)
    vocabulary = values["padded_vocab_size"]
    if vocabulary % 8:
        warnings.append(
            f"a vocabulary of {vocabulary} rows is not a multiple of 8: the output layer runs at "
            f"half speed; use --padded-vocab-size {math.ceil(vocabulary / 128) * 128}"
        )
    (refusals if start else warnings).extend(data_problems(plan))
    refusals += _index_refusals(plan) if start else ()
    if start:
        full, scarce = _room(plan)
        refusals += [*full, *sinks.missing(plan)]
        warnings += scarce
    warnings += _tokenizer_warnings(plan)
    try:
        stages = _memory(plan, values, plan.world_size)
        sent = memory.traffic(values, plan.world_size)
    except UserError:
        stages, sent = [], None
    worst = max(stages, key=lambda m: m.total, default=None)
    if worst and limit:
        large = _too_large(plan, worst, limit) if worst.total > limit else []
        # Adapters have no gradients and optimizer states of the weights that the estimate counts.
        sure = trust_memory and plan.own.lora_rank is None
        refusals += large if sure else []
        warnings += [] if sure else [f"estimated: {text}" for text in large]
        if large and plan.own.lora_rank is not None:
            warnings.append("the estimate is that of training every weight; adapters need less")
        if worst.host and plan.device == "cuda":
            refusals += _host_refusals(plan, worst)
        if TIGHT * limit < worst.total <= limit:
            warnings.append(
                f"memory is tight: {human_bytes(worst.total)} of {human_bytes(limit)} estimated"
            )
    elif worst and limit is None:
        warnings.append("the device's memory is not known here; give --device or --gpu-memory")
    return Report(
        tuple(refusals),
        tuple(warnings),
        _layout(plan, stages),
        _run(plan),
        _parameters(plan, stages),
        worst,
        tuple(stages),
        limit,
        sent,
        plan.device,
    )


def _tokenizer_warnings(plan: Plan) -> Iterator[str]:
    if plan.model is None or plan.own.hf_model is None:
        return
    largest, known = largest_token(plan.own.hf_model), plan.model.true_vocab_size
    if largest is not None and largest >= known:
        yield (
            f"the tokenizer of {plan.own.hf_model} has ids up to {largest}, but vocab_size in its "
            f"config.json is {known}: data with one of them is refused in the step that reads it"
        )


def data_problems(plan: Plan) -> Iterator[str]:
    """Why the plan's data cannot be read on this machine."""
    found = plan.data
    if plan.own.sft:
        for name in found.prefixes():
            if not (os.path.exists(name) or os.path.exists(f"{name}.json") or "*" in name):
                yield f"{name} is not on this machine (seen from {os.getcwd()})"
        return
    if not found.training and not plan.values["mock_data"]:
        yield "no data given: add --data-path PREFIX (of PREFIX.bin and PREFIX.idx)"
    for file in blend.missing(found):
        yield f"{file} is not on this machine (seen from {os.getcwd()}){_meant(file)}"


def _meant(file: str) -> str:
    """What a name that is not there was meant to be, as far as its neighbours tell."""
    prefix = os.path.splitext(file)[0]
    if os.path.exists(prefix):
        return (
            f"; {prefix} is no tokenized data: PREFIX.bin and PREFIX.idx are, which "
            "toolkits/pretrain_data_preprocessing/preprocess_data.py makes of it"
        )
    folder, name = os.path.split(prefix)
    try:
        beside = sorted(
            entry[:-4]
            for entry in os.listdir(folder or ".")
            if entry.startswith(name) and entry.endswith(".idx") and entry != f"{name}.idx"
        )
    except OSError:
        return ""
    return f"; {', '.join(os.path.join(folder, e) for e in beside[:3])} is there" if beside else ""


#: Bytes that upstream's index of the order of the data takes at least for each sample: document and
#: offset (``sample_index``, 2 x int32) and place (``shuffle_index``, uint32).
_INDEX_BYTES = 12


def _index_refusals(plan: Plan) -> Iterator[str]:
    """A run so long that the order of its samples does not fit into this machine's memory."""
    values, total = plan.values, host_memory()
    if plan.run is None or plan.own.sft or total is None:
        return
    points = plan.run.iters // (values["eval_interval"] or plan.run.iters) + 1
    evaluated = points * (values["eval_iters"] or 0) * (values["global_batch_size"] or 0)
    for samples, remedy in (
        (plan.run.samples, f"a shorter run than {plan.run.asked}"),
        (evaluated, f"fewer --eval-iters than {values['eval_iters']}"),
    ):
        index = samples * _INDEX_BYTES
        if index > total:
            yield (
                f"the order of {human_count(samples)} samples takes {human_bytes(index)}, and this "
                f"machine has {human_bytes(total)}; {remedy} is needed, or longer sequences"
            )


def _room(plan: Plan) -> tuple[list[str], list[str]]:
    """Refusal and warning about the space for checkpoints where the run saves them.

    Each node may have a disk of its own, so this one needs room for its share only.
    """
    values = plan.values
    if not (plan.own.output_dir and values["save"] and values["num_layers"]):
        return [], []
    if plan.own.lora_rank is not None:
        return [], []  # adapters are small
    if plan.run and plan.start and plan.start.iteration >= plan.run.iters:
        return [], []  # finished: nothing will be saved
    place = next(p for p in (Path(values["save"]), *Path(values["save"]).parents) if p.exists())
    nodes = max(1, plan.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", plan.world_size)))
    try:
        size, free = memory.checkpoint_bytes(values) // nodes, shutil.disk_usage(place).free
    except (OSError, UserError):
        return [], []  # said elsewhere
    words = f"a checkpoint takes {human_bytes(size)}" + (" of each node" if nodes > 1 else "")
    words += f", {place} has {human_bytes(free)} left"
    if free < size:
        return [f"{words}; make room, or give another --output-dir"], []
    if plan.own.keep_every is not None:
        return [], []
    if plan.save_minutes is not None and plan.own.keep_last is None:
        hours = free // size * plan.save_minutes / 60
        if hours < _DAY:
            return [], [
                f"{words}, which is enough for {hours:.1f} hours of one every "
                f"{plan.save_minutes:g} minutes; --keep-last N keeps N"
            ]
    iters = plan.run.iters if plan.run else 1
    count = math.ceil(iters / (values["save_interval"] or iters or 1))
    count = min(count, (plan.own.keep_last or count) + 1)
    if free < count * size:
        return [], [f"{words}, and the run holds up to {count} at a time; --keep-last N keeps N"]
    return [], []


#: Hours of checkpoints that have to fit, where none is removed.
_DAY = 24


def end_warnings(plan: Plan) -> list[str]:
    """Data whose documents run into each other; reads a few documents, so one rank is enough."""
    given = plan.values["null_tokenizer_eod_id"]
    ends = (given,) if plan.given("null_tokenizer_eod_id") else plan.ends
    return list(blend.unmarked(plan.data, ends))


def _memory(plan: Plan, values: Mapping[str, Any], world: int) -> list[Memory]:
    """Memory of every stage, at these values in place of the plan's."""
    return memory.memory(values, world, plan.device, linear_cross_entropy=plan.linear_cross_entropy)


def _host_refusals(plan: Plan, worst: Memory) -> Iterator[str]:
    """Offloading that needs more memory than this machine has."""
    total = host_memory()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", min(plan.world_size, 8)))
    if total is not None and worst.host * local > total:
        yield (
            f"offloading puts {human_bytes(worst.host)} of each of {local} ranks into host memory, "
            f"and this machine has {human_bytes(total)}; a smaller --optimizer-offload-fraction or "
            "--cpu-offloading-num-layers, or --recompute-granularity full, is needed"
        )


def _too_large(plan: Plan, worst: Memory, limit: int) -> list[str]:
    """The refusal about memory with the first remedy that is enough."""
    where = f" on stage {worst.stage}" if plan.values["pipeline_model_parallel_size"] > 1 else ""
    head = f"{human_bytes(worst.total)} a rank{where} against {human_bytes(limit)} of {plan.device}"
    for change, words in _remedies(plan):
        trial = {**plan.values, **change}
        try:
            if any(_layout_refusals(trial, plan.world_size)) or any(
                _batch_refusals(trial, plan.world_size)
            ):
                continue
            peak = max(m.total for m in _memory(plan, trial, plan.world_size))
        except UserError:
            continue
        if peak <= limit:
            return [f"{head}; with {words} it is {human_bytes(peak)}"]
    return [f"{head}, and no single change is enough; try --parallel auto or more ranks"]


def _remedies(plan: Plan) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes worth trying, the cheapest first."""
    values = plan.values
    if values["micro_batch_size"] > 1:
        yield {"micro_batch_size": 1}, "--micro-batch-size 1"
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    for dest, name in (
        ("expert_model_parallel_size", "--ep"),
        ("tensor_model_parallel_size", "--tp"),
        ("pipeline_model_parallel_size", "--pp"),
        ("context_parallel_size", "--cp"),
    ):
        if name == "--ep" and not values["num_experts"]:
            continue
        size = values[dest] * 2
        while size <= plan.world_size:
            change: dict[str, Any] = {dest: size}
            if name == "--tp":
                change["sequence_parallel"] = True
            yield change, f"{name} {size}"
            size *= 2
    words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if not values["recompute_granularity"]:
        yield full, words
    if not values["optimizer_cpu_offload"] and plan.device != "cpu":
        offload = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
        yield offload, "--cpu-offloading-optimizer"
        yield {**offload, **full}, f"--cpu-offloading-optimizer {words}"


def _layout(plan: Plan, stages: list[Memory]) -> dict[str, Any]:
    values = plan.values
    sizes = Sizes.of(values, plan.world_size)
    out: dict[str, Any] = {
        "world_size": plan.world_size,
        "tensor": sizes.tp,
        "pipeline": sizes.pp,
        "virtual": memory.virtual_stages(values),
        "context": sizes.cp,
        "data": sizes.dp,
        "expert": sizes.ep,
        "expert_tensor": sizes.etp if values["num_experts"] else 1,
        "expert_data": sizes.edp if values["num_experts"] else sizes.dp,
        "sequence_parallel": bool(values["sequence_parallel"]),
        "heads_per_rank": values["num_attention_heads"] / sizes.tp,
    }
    if stages:
        out["layers_per_stage"] = [
            [len(chunk) for chunk in stage.chunks] for stage in memory.stages(values)
        ]
    if values["group_query_attention"]:
        out["kv_heads_per_rank"] = max(1, values["num_query_groups"] / sizes.tp)
    if values["num_experts"]:
        out["experts_per_rank"] = values["num_experts"] / sizes.ep
    for key in ("heads_per_rank", "kv_heads_per_rank", "experts_per_rank"):
        if key in out:
            out[key] = int(out[key]) if out[key] == int(out[key]) else round(out[key], 2)
    return out


def _run(plan: Plan) -> dict[str, Any]:
    values = plan.values
    sizes = Sizes.of(values, plan.world_size)
    batch, length = values["global_batch_size"], values["seq_length"]
    out: dict[str, Any] = {
        "global_batch_size": batch,
        "micro_batch_size": values["micro_batch_size"],
        "seq_length": length,
        "tokens_per_step": batch * length if batch and length else None,
        "micro_batches": batch // max(1, values["micro_batch_size"] * sizes.dp) if batch else None,
    }
    if plan.run:
        out |= {
            "asked": plan.run.asked,
            "iters": plan.run.iters,
            "samples": plan.run.samples,
            "tokens": plan.run.tokens,
            "epochs": plan.run.epochs,
            "sft": plan.own.sft,
            "sources": [dataclasses.asdict(reading) for reading in plan.readings],
        }
    return out


def _parameters(plan: Plan, stages: list[Memory]) -> dict[str, int]:
    count = memory.parameters(plan.values)
    out = {"total": count.total, "active": count.active}
    if stages:
        out["per_rank"] = max(memory.rank_parameters(plan.values, plan.world_size))
    return out


# --- auto layout ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits, and what it loses in a step.

    Attributes:
        change: Megatron dest -> value.
        seconds: Exposed communication, pipeline waiting and recomputation of one step.
        parts: The same by cause.
        traffic: Bytes a rank sends.
        total: Estimated memory of the fullest rank, bytes.
    """

    change: dict[str, Any]
    seconds: float
    parts: dict[str, float]
    traffic: Traffic
    total: int

    def words(self) -> str:
        """The layout as flags."""
        return _words(self.change)


def _words(change: Mapping[str, Any]) -> str:
    names = {
        "tensor_model_parallel_size": "--tp",
        "pipeline_model_parallel_size": "--pp",
        "context_parallel_size": "--cp",
        "expert_model_parallel_size": "--ep",
        "micro_batch_size": "--mbs",
    }
    out = [f"{flag} {change[dest]}" for dest, flag in names.items()]
    if change["recompute_granularity"]:
        out.append("recompute full")
    return " ".join(out)


def _powers(most: int) -> list[int]:
    return [d for d in range(1, most + 1) if most % d == 0 and (d & (d - 1) == 0 or d == most)]


def candidates(
    plan: Plan, rejected: list[tuple[tuple[str, ...], int, str]] | None = None
) -> list[Candidate]:
    """Every layout that divides and fits, the one that loses least first.

    Sizes that the user gave stay. A step loses: tensor and expert traffic over the link that the
    group spans (NVLink inside a node, the network across nodes); context traffic as far as it is
    longer than the attention beside which it runs, data traffic as far as it is longer than one
    micro batch; the pipeline's waiting, ``(pp - 1) / (v m)`` of the compute; a third of the
    compute where all layers are recomputed.

    Args:
        plan: What is given.
        rejected: Filled with every other layout: its refusals (none: it is too large), its memory
            in bytes, and its words.
    """
    values = plan.values
    world = plan.world_size
    limit = device_memory(plan)
    if limit is None:
        raise UserError("--parallel auto needs the device's memory; give --device or --gpu-memory")
    if not plan.given("global_batch_size"):
        raise UserError(
            "--parallel auto needs --global-batch-size: without it each layout would train "
            "another batch"
        )
    per_node = plan.own.gpus_per_node or min(8, world)
    moe = bool(values["num_experts"])

    def choices(dest: str, all_of: list[int]) -> list[int]:
        return [values[dest]] if plan.given(dest) and values[dest] else all_of

    tps = choices("tensor_model_parallel_size", _powers(min(per_node, world)))
    pps = choices("pipeline_model_parallel_size", _powers(world))
    cps = choices("context_parallel_size", _powers(world) if values["seq_length"] >= 8192 else [1])
    eps = choices("expert_model_parallel_size", _powers(world) if moe else [1])
    mbs = choices("micro_batch_size", [1, 2, 4, 8])
    fixed = plan.given("recompute_granularity") or values["cpu_offloading_num_layers"]
    recomputes = [values["recompute_granularity"]] if fixed else [None, "full"]
    found = []
    for tp, pp, cp in itertools.product(tps, pps, cps):
        if tp * pp * cp > world or world % (tp * pp * cp):
            continue
        for ep, micro, recompute in itertools.product(eps, mbs, recomputes):
            change: dict[str, Any] = {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "context_parallel_size": cp,
                "expert_model_parallel_size": ep,
                "micro_batch_size": micro,
                "recompute_granularity": recompute,
            }
            if recompute == "full" and not fixed:
                change |= {"recompute_method": "uniform", "recompute_num_layers": 1}
            trial = {**values, **change}
            if not plan.given("sequence_parallel"):
                trial["sequence_parallel"] = tp > 1
            if moe and not plan.given("expert_tensor_parallel_size"):
                trial["expert_tensor_parallel_size"] = 1
            candidate = _judge(plan, change, trial, limit, per_node, rejected is not None)
            if isinstance(candidate, Candidate):
                found.append(candidate)
            elif rejected is not None:
                rejected.append((*candidate, _words(change)))
    return sorted(found, key=_preference)


def _preference(candidate: Candidate) -> tuple[float, int, int, int]:
    """Least lost time (to 2 %), then no recomputation, the larger micro batch, less memory."""
    change = candidate.change
    bucket = round(math.log(max(candidate.seconds, 1e-6)) / 0.02)
    recompute = int(change["recompute_granularity"] == "full")
    return (bucket, recompute, -change["micro_batch_size"], candidate.total)


def _judge(
    plan: Plan,
    change: dict[str, Any],
    trial: dict[str, Any],
    limit: int,
    per_node: int,
    explain: bool,
) -> Candidate | tuple[tuple[str, ...], int]:
    """The candidate, or why it is refused, or, without refusals, its memory, which is too much.

    Args:
        plan: What is given.
        change: The layout.
        trial: The values with it.
        limit: Bytes of a rank.
        per_node: Ranks a node.
        explain: Find all refusals; else the first one is enough.
    """
    world = plan.world_size
    try:
        found = itertools.chain(_layout_refusals(trial, world), _batch_refusals(trial, world))
        refusals = tuple(found if explain else itertools.islice(found, 1))
        if refusals:
            return refusals, 0
        total = max(m.total for m in _memory(plan, trial, world))
    except UserError as problem:
        return (str(problem),), 0
    if total > TIGHT * limit:
        return (), total
    sent = memory.traffic(trial, world)
    sizes = Sizes.of(trial, world)
    flops, near, far = SPEED.get(plan.device, SPEED["h100"])
    compute = memory.step_flops(trial) / world / (flops * 1e12)
    attention = memory.attention_flops(trial) / world / (flops * 1e12)
    steps = trial["global_batch_size"] / (trial["micro_batch_size"] * sizes.dp)

    def seconds(volume: float, span: int) -> float:
        return volume / ((near if span <= per_node else far) * 1e9)

    # Megatron lays ranks out tensor first, then context (or expert), data, pipeline last.
    inner = sizes.tp * sizes.cp
    data = seconds(sent.data, world // sizes.pp if sizes.dp * sizes.cp > 1 else 1)
    parts = {
        "tensor": seconds(sent.tensor, sizes.tp),
        "context": max(0.0, seconds(sent.context, inner) - attention),
        "expert": seconds(sent.expert, sizes.etp * sizes.ep),
        "pipeline": seconds(sent.pipeline, world),
        "data": max(0.0, data - compute / steps),
        "waiting": compute * (sizes.pp - 1) / (steps * memory.virtual_stages(trial)),
        "recompute": compute / 3 if trial["recompute_granularity"] == "full" else 0.0,
    }
    return Candidate(change, sum(parts.values()), parts, sent, total)


def _no_layout(plan: Plan, rejected: list[tuple[tuple[str, ...], int, str]]) -> str:
    """Why ``--parallel auto`` finds nothing: what all layouts have in common."""
    head = f"--parallel auto: no layout of {plan.world_size} ranks"
    large = [(total, words) for refusals, total, words in rejected if not refusals]
    if large:
        total, words = min(large)
        limit = device_memory(plan) or 0
        return (
            f"{head} fits into {TIGHT:.0%} of {human_bytes(limit)}: the smallest of {len(large)} "
            f"that divide, {words}, needs {human_bytes(total)} a rank; use more ranks, "
            "--cpu-offloading-optimizer or a shorter --seq-length"
        )
    if rejected:
        every = set.intersection(*(set(refusals) for refusals, _, _ in rejected))
        least = min(rejected, key=lambda one: len(one[0]))
        if every:
            return f"{head} is possible: {'; '.join(r for r in least[0] if r in every)}"
        return f"{head} divides; nearest is {least[2]}: {'; '.join(least[0])}"
    # The sizes that were given divide nothing, so none was tried.
    refusals = [*_layout_refusals(plan.values, plan.world_size)]
    return f"{head} is possible: {'; '.join(refusals)}"


def auto_layout(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """The layout of ``--parallel auto``: values to set and notes that say why.

    Raises:
        UserError: None fits; the message names the smallest that was seen.
    """
    shape = list(_shape(plan.values))
    if shape:
        raise UserError(shape[0])
    found = candidates(plan)
    if not found:
        rejected: list[tuple[tuple[str, ...], int, str]] = []
        candidates(plan, rejected)
        raise UserError(_no_layout(plan, rejected))
    best = found[0]
    notes = [f"{AUTO} takes {best.words()} out of {len(found)} layouts that fit"]
    for candidate in found[:3]:
        lost = ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in candidate.parts.items() if v >= 5e-4)
        notes.append(
            f"{candidate.words()}: loses {candidate.seconds * 1e3:.0f} ms a step "
            f"({lost or 'nothing'}), sends {human_bytes(candidate.traffic.total)} a rank, "
            f"needs {human_bytes(candidate.total)}"
        )
    defaults = {"recompute_granularity": None}
    chosen = {d: v for d, v in best.change.items() if not plan.given(d) and defaults.get(d, 0) != v}
    return chosen, notes


#: Share of the device that a micro batch nobody asked for may fill, and its tokens a rank at most:
#: more make no kernel faster.
ROOMY, MANY_TOKENS = 0.8, 32768


def largest_micro_batch(plan: Plan) -> int | None:
    """The micro batch that a dense model takes where none is given; None leaves it at one.

    Small ones leave a GPU waiting for the CPU that launches its kernels. The batch of a step stays
    what was asked for, in the same order. A mixture of experts keeps one sequence: its
    load-balancing loss is computed over the micro batch. With pipeline stages at least four micro
    batches a stage remain.
    """
    values, fixed = plan.values, plan.own.gradient_accumulation_steps
    if values["num_experts"] or fixed or not values["global_batch_size"]:
        return None
    if not plan.source["global_batch_size"].startswith(COMMAND_LINE):
        return None
    limit = device_memory(plan)
    if limit is None:
        return None
    rows = values["global_batch_size"] // plan.data_parallel_size
    pp = values["pipeline_model_parallel_size"]
    tokens = values["seq_length"] / max(1, values["context_parallel_size"])
    for micro in (8, 4, 2):
        trial = {**values, "micro_batch_size": micro}
        if rows % micro or micro * tokens > MANY_TOKENS or (pp > 1 and rows // micro < 4 * pp):
            continue
        try:
            needed = max(m.total for m in _memory(plan, trial, plan.world_size))
        except UserError:  # a shape that `check` refuses in words
            return None
        if needed <= ROOMY * limit:
            return micro
    return None


#: Steps of the fraction of the optimizer's states that is moved.
_TWENTIETHS = tuple(n / 20 for n in range(21))


def auto_offload(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """How much ``--cpu-offloading`` and ``--cpu-offloading-optimizer`` move: no more than needed.

    States of the optimizer go first: they cross the bus once a step, activations with every micro
    batch. What the user gave in numbers stays; where the device's memory is unknown all is moved.

    Returns:
        Megatron dest -> value, and notes that say why.
    """
    values, limit = plan.values, device_memory(plan)
    free = {
        "optimizer_offload_fraction": plan.own.cpu_offloading_optimizer,
        "cpu_offloading_num_layers": plan.own.cpu_offloading,
    }
    free = {dest: on and not plan.given(dest) for dest, on in free.items()}
    if plan.own.cpu_offloading and plan.source["cpu_offloading_num_layers"].endswith(
        "(--cpu-offloading)"
    ):
        free["cpu_offloading_num_layers"] = True
    if not any(free.values()) or limit is None or plan.device == "cpu" or any(_shape(values)):
        return {}, []
    if any(_offload_refusals(plan)):
        return {}, []
    layers = values["cpu_offloading_num_layers"] if free["cpu_offloading_num_layers"] else 0
    fractions = _TWENTIETHS if free["optimizer_offload_fraction"] else (None,)
    trials = [(fraction, 0) for fraction in fractions]
    trials += [(fractions[-1], count) for count in range(1, layers + 1)]
    found = total = None
    for fraction, count in trials:
        change: dict[str, Any] = {}
        if fraction is not None:
            change["optimizer_offload_fraction"] = fraction
            change["optimizer_cpu_offload"] = fraction > 0
        if free["cpu_offloading_num_layers"]:
            change["cpu_offloading_num_layers"] = count
        try:
            total = max(m.total for m in _memory(plan, {**values, **change}, plan.world_size))
        except UserError:
            return {}, []  # said by the check
        found = change
        if total <= TIGHT * limit:
            break
    assert found is not None and total is not None
    if found.get("optimizer_cpu_offload") is False:
        found |= {"use_precision_aware_optimizer": False, "overlap_cpu_optimizer_d2h_h2d": False}
        del found["optimizer_offload_fraction"]
    moved = []
    if "optimizer_offload_fraction" in found:
        moved.append(f"{found['optimizer_offload_fraction']:.0%} of the optimizer's states")
    if found.get("cpu_offloading_num_layers"):
        moved.append(f"the activations of {found['cpu_offloading_num_layers']} layers")
    asked = [
        flag
        for flag, on in (
            ("--cpu-offloading", plan.own.cpu_offloading),
            ("--cpu-offloading-optimizer", plan.own.cpu_offloading_optimizer),
        )
        if on
    ]
    room = f"{human_bytes(total)} of {human_bytes(limit)} are then estimated"
    words = " and ".join(moved) + " move to host memory" if moved else "nothing has to be moved"
    numbers = "--optimizer-offload-fraction and --cpu-offloading-num-layers take numbers"
    return found, [f"{' '.join(asked)}: {words}; {room} ({numbers})"]


# --- printing ---------------------------------------------------------------------------------


def _rows(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sections of (name, value) for the table."""
    sections: list[tuple[str, list[tuple[str, str]]]] = []
    layout = report.layout
    if layout:
        rows = [
            (
                "ranks",
                f"{layout['world_size']} = TP {layout['tensor']} x PP {layout['pipeline']} x CP "
                f"{layout['context']} x DP {layout['data']}",
            )
        ]
        if layout["virtual"] > 1:
            rows.append(("virtual stages", str(layout["virtual"])))
        if "experts_per_rank" in layout:
            rows.append(
                (
                    "expert ranks",
                    f"EP {layout['expert']} x ETP {layout['expert_tensor']} x DP "
                    f"{layout['expert_data']}, {layout['experts_per_rank']} experts a rank",
                )
            )
        if "layers_per_stage" in layout:
            rows.append(
                (
                    "layers a stage",
                    " | ".join("+".join(map(str, chunks)) for chunks in layout["layers_per_stage"]),
                )
            )
        kv = layout.get("kv_heads_per_rank")
        heads = f"{layout['heads_per_rank']}" + (f" ({kv} key/value)" if kv is not None else "")
        rows.append(("heads a rank", heads))
        sections.append(("Layout", rows))
    run = report.run
    rows = []
    if run["tokens_per_step"]:
        rows.append(
            (
                "step",
                f"{run['global_batch_size']} sequences x {run['seq_length']} = "
                f"{run['tokens_per_step']:,} tokens, {run['micro_batches']} micro batches of "
                f"{run['micro_batch_size']} a rank",
            )
        )
    if "iters" in run:
        why = "the chats are not packed yet" if run["sft"] else "no data here"
        epochs = f"{run['epochs']:.4g} epochs" if run["epochs"] else f"epochs unknown ({why})"
        rows.append(
            (
                "run",
                f"{run['iters']:,} steps = {run['samples']:,} samples = {run['tokens']:,} tokens = "
                f"{epochs}",
            )
        )
    if rows:
        sections.append(("Run", rows))
    sources = [blend.Reading(**source) for source in run.get("sources", ())]
    if len(sources) > 1:
        sections.append(("Data", [(os.path.basename(r.prefix), str(r)) for r in sources]))
    if report.parameters:
        count = report.parameters
        text = human_count(count["total"])
        if count["active"] != count["total"]:
            text += f", {human_count(count['active'])} for a token"
        if "per_rank" in count:
            text += f", {human_count(count['per_rank'])} on the fullest rank"
        sections.append(("Parameters", [("count", f"{text} ({count['total']:,})")]))
    if report.memory:
        one = report.memory
        title = "Memory of a rank" + (f" (stage {one.stage})" if len(report.stages) > 1 else "")
        rows = [
            (name, human_bytes(getattr(one, name)))
            for name in (
                "weights",
                "gradients",
                "optimizer",
                "activations",
                "logits",
                "working",
                "overhead",
            )
        ]
        of = f" of {human_bytes(report.limit)} ({report.device})" if report.limit else ""
        rows.append(("in all", human_bytes(one.total) + of))
        if one.host:
            rows.append(("host memory", f"{human_bytes(one.host)} a rank"))
        sections.append((title, rows))
    if report.traffic:
        sent = dataclasses.asdict(report.traffic)
        text = ", ".join(f"{k} {human_bytes(v)}" for k, v in sent.items() if v)
        sections.append(("Communication", [("a rank and step", text or "none")]))
    return sections


def render(report: Report, notes: list[str], color: bool) -> str:
    """The report as text; with colour through rich where that is installed."""
    lines = []
    for title, rows in _rows(report):
        lines.append(title)
        lines += [f"  {column(name, 16)}{value}" for name, value in rows]
    lines += [f"note: {note}" for note in notes]
    lines += [f"warning: {text}" for text in report.warnings]
    lines += [f"refused: {text}" for text in report.refusals]
    lines.append("OK" if report.ok else f"REFUSED ({len(report.refusals)})")
    text = "\n".join(lines)
    return _colored(report, notes) if color else text


def _colored(report: Report, notes: list[str]) -> str:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(force_terminal=True)
    with console.capture() as capture:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for title, rows in _rows(report):
            table.add_row(f"[bold]{escape(title)}[/]", "")
            for name, value in rows:
                table.add_row(f"  {name}", escape(value))
        console.print(table)
        for word, style, texts in (
            ("note", "dim", notes),
            ("warning", "yellow", report.warnings),
            ("refused", "bold red", report.refusals),
        ):
            for text in texts:
                console.print(f"[{style}]{word}:[/] {escape(text)}")
        verdict = (
            "[bold green]OK[/]" if report.ok else f"[bold red]REFUSED ({len(report.refusals)})[/]"
        )
        console.print(verdict)
    return capture.get().rstrip("\n")


def main(argv: list[str]) -> int:
    """``megatron-patch check``: 0 where the run may start, 2 where it is refused."""
    asked = {token.replace("_", "-") for token in argv}
    if asked & {"--help", "-h", "--help-all"}:
        sys.stdout.write(help_text("megatron-patch check", "--help-all" in asked))
        return 0
    as_json = "--json" in asked
    try:
        plan = resolve(argv, need_length=False)
        report = check(plan)
        report = dataclasses.replace(report, warnings=(*report.warnings, *end_warnings(plan)))
    except UserError as problem:
        if as_json:
            print(json.dumps({"ok": False, "refusals": [str(problem)]}))
        print(f"error: {problem}", file=sys.stderr)
        return 2
    notes = list(plan.notes)
    if plan.environment.assumed and not plan.own.device and not plan.own.gpu_memory:
        notes.append(f"no GPU here and no --device: planned for {plan.device}")
    if plan.run is None and plan.own.epochs is None:
        notes.append(
            "no run length given: --train-tokens, --train-iters, --train-samples, --epochs"
        )
    if as_json:
        print(json.dumps({**report.as_dict(), "notes": notes}))
    else:
        print(render(report, notes, sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0 if report.ok else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
