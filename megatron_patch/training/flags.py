"""The flags: their table with all aliases, the numbers they may take, and reading a command line.

Ours stand in :data:`OWN_FLAGS`; Megatron's own (:func:`megatron_patch._compat.flag_table`) pass
through. What a flag means where several are given:

* ``_`` equals ``-``; ``--flag=value`` equals ``--flag value``.
* The same spelling twice: the last one wins (a launcher's arrays come first, the user's last).
* Two spellings of one setting with different values: an error that names both.
* ``--user-flags`` separates a launcher's flags from the user's; across it the user always wins.
* ``--no-FLAG`` switches off any on/off flag, also those that Megatron only lets one switch on.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from megatron_patch import _compat
from megatron_patch.util import Range, UserError

#: Marks the end of a launcher's own flags; what follows is the user's and wins.
USER_FLAGS_MARK = "--user-flags"

#: GPU memory in GiB as the driver reports it, compute capability, and whether the boards of that
#: name are normally joined by NVSwitch with multicast (source: NVIDIA data sheets).
DEVICES: dict[str, tuple[float, tuple[int, int], bool]] = {
    "a100": (79.2, (8, 0), False),
    "h100": (79.2, (9, 0), True),
    "h200": (139.8, (9, 0), True),
    "b200": (178.4, (10, 0), True),
}

#: ``--fp8`` name -> (Megatron's recipe, format, rows that must divide a rank's tokens, lowest
#: compute capability, highest one or None).
FP8_RECIPES: dict[str, tuple[str, str, int, tuple[int, int], tuple[int, int] | None]] = {
    "tensorwise": ("tensorwise", "hybrid", 16, (8, 9), None),
    "delayed": ("delayed", "hybrid", 16, (8, 9), None),
    "blockwise": ("blockwise", "e4m3", 128, (9, 0), (9, 9)),
    "mxfp8": ("mxfp8", "e4m3", 32, (10, 0), None),
}


@dataclass(frozen=True, slots=True)
class OwnFlag:
    """One flag of ours.

    Attributes:
        name: Canonical option, as shown in messages.
        aliases: Other spellings.
        dest: Megatron dest that it sets, or the name of an :class:`OwnFlags` field.
        kind: ``str``, ``int``, ``float``, ``count`` (``1B``, ``100M``), ``flag``, ``list``.
        group: Heading in ``--help``.
        help: One line.
        metavar: Shown after the option.
        choices: Allowed values.
        default: What ``--help`` says about the default.
    """

    name: str
    aliases: tuple[str, ...]
    dest: str
    kind: str
    group: str
    help: str
    metavar: str = ""
    choices: tuple[str, ...] | None = None
    default: str = ""


#: Heading of the flags that need ``--sft``.
FINE_TUNING = "Fine-tuning (--sft)"
_MODEL, _DATA, _RUN, _PARALLEL, _MEMORY, _TOOL = (
    "Model and directories",
    "Data and batch",
    "Run length and learning rate",
    "Parallel layout",
    "Precision and memory",
    "What to do",
)

#: How records become samples; the tools of ``toolkits/sft_data_preprocessing`` have them too.
CHAT_FLAGS: tuple[OwnFlag, ...] = (
    OwnFlag(
        "--schema",
        (),
        "schema",
        "str",
        FINE_TUNING,
        "what records are",
        "NAME",
        choices=("tokenized", "messages", "conversations", "prompt-completion", "alpaca"),
        default="told from their keys",
    ),
    OwnFlag(
        "--prompt-completion-as",
        (),
        "prompt_completion_as",
        "str",
        FINE_TUNING,
        "prompt and completion that are strings: text with an EOS behind, or a chat of two turns "
        "in the model's template",
        "FORM",
        choices=("text", "chat"),
        default="text",
    ),
    OwnFlag(
        "--on-overlong",
        (),
        "on_overlong",
        "str",
        FINE_TUNING,
        "samples longer than the sequence: leave them out and count them, cut their end off, or "
        "end the run",
        "WHAT",
        choices=("drop", "truncate", "error"),
        default="drop",
    ),
    OwnFlag(
        "--on-bad-line",
        (),
        "on_bad_line",
        "str",
        FINE_TUNING,
        "a record that is no JSON, fits no schema, or whose trained turns cannot be located: end "
        "the run, or leave it out and count it",
        "WHAT",
        choices=("error", "skip"),
        default="error",
    ),
    OwnFlag(
        "--chat-template",
        (),
        "chat_template",
        "str",
        FINE_TUNING,
        "Jinja file instead of the model's",
        "FILE",
    ),
    OwnFlag(
        "--chat-template-kwargs",
        (),
        "chat_template_kwargs",
        "str",
        FINE_TUNING,
        'variables of the template, as {"enable_thinking": false}',
        "JSON",
        default="{}",
    ),
    OwnFlag(
        "--eod-token",
        (),
        "eod_token",
        "str",
        FINE_TUNING,
        "the EOS, if not the tokenizer's",
        "TEXT",
    ),
)

OWN_FLAGS: tuple[OwnFlag, ...] = (
    OwnFlag(
        "--hf-model",
        ("--model", "--model-name-or-path", "--hf-dir", "--load-hf"),
        "hf_model",
        "str",
        _MODEL,
        "Hugging Face directory; every size comes from its config.json",
        "DIR",
    ),
    OwnFlag(
        "--output-dir",
        ("--output", "--save", "--output-path"),
        "output_dir",
        "str",
        _MODEL,
        "run directory; the same command again goes on from its checkpoints. The data's index goes "
        "to cache/ in it, which all nodes must see, or where --data-cache-path says",
        "DIR",
    ),
    OwnFlag(
        "--init-from",
        ("--pretrained-checkpoint",),
        "init_from",
        "str",
        _MODEL,
        "start from these weights only: iteration 0, fresh optimizer, schedule and data. A Hugging "
        "Face directory, a run, its checkpoints/ or one step of them (checkpoints/best)",
        "DIR",
    ),
    OwnFlag(
        "--save-hf",
        (),
        "save_hf",
        "str",
        _MODEL,
        "Hugging Face directories at the end: hf/ of the last checkpoint; best: also hf-best/ of "
        "the one with the lowest validation loss; every: also hf-iter_N/ of each that is kept",
        "WHICH",
        choices=("best", "last", "every", "none"),
        default="none; fine-tuning: best",
    ),
    OwnFlag(
        "--data-path",
        ("--data", "--dataset", "--dataset-path"),
        "data_path",
        "list",
        _DATA,
        "prefix of .bin/.idx, or weight prefix weight prefix ...; --sft: chats (.jsonl, .json, "
        ".parquet, folders) or prepared sets, a weight being how often an epoch reads the set",
        "PREFIX",
    ),
    OwnFlag(
        "--valid-data-path",
        ("--eval-data-path", "--validation-data-path"),
        "valid_data_path",
        "list",
        _DATA,
        "data that is evaluated on, not trained; NAME=PREFIX NAME=PREFIX ...: a loss for each set, "
        "over the same first --eval-iters steps of it every time",
        "PREFIX",
    ),
    OwnFlag(
        "--seq-length",
        ("--seq-len", "--max-length"),
        "seq_length",
        "int",
        _DATA,
        "tokens a sequence",
        "N",
    ),
    OwnFlag(
        "--micro-batch-size",
        ("--mbs",),
        "micro_batch_size",
        "int",
        _DATA,
        "sequences a rank takes at once",
        "N",
        default="1",
    ),
    OwnFlag(
        "--global-batch-size",
        ("--gbs",),
        "global_batch_size",
        "int",
        _DATA,
        "sequences a step over all ranks",
        "N",
        default="micro batch x data parallel",
    ),
    OwnFlag(
        "--per-device-train-batch-size",
        ("--per-device-batch-size",),
        "per_device_train_batch_size",
        "int",
        _DATA,
        "sequences a data-parallel replica (not a GPU: TP x PP x CP of them are one) takes in one "
        "of its --gradient-accumulation-steps",
        "N",
    ),
    OwnFlag(
        "--gradient-accumulation-steps",
        (),
        "gradient_accumulation_steps",
        "int",
        _DATA,
        "with --per-device-train-batch-size: --global-batch-size is the product of both and of the "
        "number of replicas",
        "N",
        default="1",
    ),
    OwnFlag(
        "--train-tokens",
        (),
        "train_tokens",
        "count",
        _RUN,
        "run length in tokens (1B, 500M, 2e9)",
        "N",
    ),
    OwnFlag(
        "--train-iters",
        ("--train-steps", "--max-steps"),
        "train_iters",
        "count",
        _RUN,
        "run length in steps",
        "N",
    ),
    OwnFlag("--train-samples", (), "train_samples", "count", _RUN, "run length in sequences", "N"),
    OwnFlag(
        "--epochs",
        ("--num-train-epochs",),
        "epochs",
        "float",
        _RUN,
        "run length in passes over --data-path",
        "X",
    ),
    OwnFlag("--lr", ("--learning-rate",), "lr", "float", _RUN, "peak learning rate", "X"),
    OwnFlag("--min-lr", (), "min_lr", "float", _RUN, "last learning rate", "X", default="lr / 10"),
    OwnFlag(
        "--warmup-steps",
        ("--lr-warmup-iters", "--warmup-iters"),
        "lr_warmup_iters",
        "count",
        _RUN,
        "steps of linear warm-up",
        "N",
        default="1 % of the run, at most 2000; --sft: 3 %",
    ),
    OwnFlag(
        "--warmup-ratio",
        ("--lr-warmup-fraction",),
        "lr_warmup_fraction",
        "float",
        _RUN,
        "warm-up as a share of the run",
        "X",
    ),
    OwnFlag(
        "--parallel",
        (),
        "parallel",
        "str",
        _PARALLEL,
        "auto: the layout with the least communication that fits",
        "auto",
        choices=("auto",),
    ),
    OwnFlag(
        "--tp",
        ("--tensor-model-parallel-size",),
        "tensor_model_parallel_size",
        "int",
        _PARALLEL,
        "tensor parallel size (sequence parallel comes with it)",
        "N",
        default="1",
    ),
    OwnFlag(
        "--pp",
        ("--pipeline-model-parallel-size",),
        "pipeline_model_parallel_size",
        "int",
        _PARALLEL,
        "pipeline stages",
        "N",
        default="1",
    ),
    OwnFlag(
        "--vpp",
        ("--num-virtual-stages-per-pipeline-rank",),
        "num_virtual_stages_per_pipeline_rank",
        "int",
        _PARALLEL,
        "virtual stages a pipeline rank (interleaved schedule)",
        "N",
    ),
    OwnFlag(
        "--cp",
        ("--context-parallel-size",),
        "context_parallel_size",
        "int",
        _PARALLEL,
        "context parallel size",
        "N",
        default="1",
    ),
    OwnFlag(
        "--ep",
        ("--expert-model-parallel-size",),
        "expert_model_parallel_size",
        "int",
        _PARALLEL,
        "expert parallel size",
        "N",
        default="1",
    ),
    OwnFlag(
        "--etp",
        ("--expert-tensor-parallel-size",),
        "expert_tensor_parallel_size",
        "int",
        _PARALLEL,
        "tensor parallel size inside an expert",
        "N",
        default="1 for MoE",
    ),
    OwnFlag(
        "--precision",
        (),
        "precision",
        "str",
        _MEMORY,
        "number format of weights and activations",
        "NAME",
        choices=("bf16", "fp16", "fp32"),
        default="bf16; fp32 on CPU",
    ),
    OwnFlag(
        "--fp8",
        (),
        "fp8",
        "str",
        _MEMORY,
        "FP8 recipe for the linear layers",
        "RECIPE",
        choices=tuple(FP8_RECIPES),
    ),
    OwnFlag(
        "--cpu-offloading",
        (),
        "cpu_offloading",
        "flag",
        _MEMORY,
        "keep activations in host memory, of as many layers as do not fit; of N with "
        "--cpu-offloading-num-layers N",
    ),
    OwnFlag(
        "--cpu-offloading-optimizer",
        (),
        "cpu_offloading_optimizer",
        "flag",
        _MEMORY,
        "keep optimizer states in host memory and update there, overlapped: as many as do not fit, "
        "or the share --optimizer-offload-fraction F",
    ),
    OwnFlag(
        "--backend",
        (),
        "backend",
        "str",
        _MEMORY,
        "modules to build from: Transformer Engine's, or this library's on torch alone",
        "NAME",
        choices=("te", "torch"),
        default="te where it is installed",
    ),
    OwnFlag(
        "--linear-cross-entropy",
        (),
        "linear_cross_entropy",
        "str",
        _MEMORY,
        "output layer and loss in one, without ever holding all logits",
        "auto|on|off",
        choices=("auto", "on", "off"),
        default="auto: on for GPUs, where the loss is a plain sum over tokens",
    ),
    OwnFlag(
        "--sft",
        (),
        "sft",
        "flag",
        FINE_TUNING,
        "fine-tune on chats (megatron_patch.sft); never Megatron's flag of that name",
    ),
    OwnFlag(
        "--sft-loss-unit",
        ("--loss-unit",),
        "sft_loss_unit",
        "str",
        FINE_TUNING,
        "token: every trained token of a step weighs the same; sample: every sample does",
        "UNIT",
        choices=("token", "sample"),
        default="token",
    ),
    OwnFlag(
        "--no-packing",
        (),
        "no_packing",
        "flag",
        FINE_TUNING,
        "one sample a sequence instead of as many as fit",
    ),
    OwnFlag(
        "--pad-to-max-length",
        (),
        "pad_to_max_length",
        "flag",
        FINE_TUNING,
        "with --no-packing: every sequence is --seq-length long (it always is in a pipeline)",
    ),
    OwnFlag(
        "--freeze",
        (),
        "freeze",
        "list",
        FINE_TUNING,
        "regular expressions: parameters whose Megatron name one of them matches stay as they are "
        "(router, embedding, layers\\.[0-3]\\.)",
        "RE",
    ),
    OwnFlag(
        "--lora-rank",
        ("--lora-r",),
        "lora_rank",
        "int",
        FINE_TUNING,
        "train low-rank adapters of this rank; the model's weights stay as they are",
        "N",
    ),
    OwnFlag(
        "--lora-alpha",
        (),
        "lora_alpha",
        "float",
        FINE_TUNING,
        "adapters are scaled by alpha / rank",
        "X",
        default="2 x rank",
    ),
    OwnFlag(
        "--lora-dropout",
        (),
        "lora_dropout",
        "float",
        FINE_TUNING,
        "dropout of the adapters' input",
        "X",
        default="0",
    ),
    OwnFlag(
        "--lora-target-modules",
        (),
        "lora_target_modules",
        "list",
        FINE_TUNING,
        "Hugging Face names of the layers with adapters (q_proj v_proj ...), or all-linear; "
        "experts stands for the routed experts, which all-linear leaves out as PEFT does",
        "NAME",
        default="all-linear",
    ),
    *CHAT_FLAGS,
    OwnFlag(
        "--fused-kernels",
        (),
        "fused_kernels",
        "str",
        _MEMORY,
        "own kernels for queries, keys and values (split, norm, rotary embedding) and SwiGLU",
        "auto|off",
        choices=("auto", "off"),
        default="auto: on for GPUs, in the layers that they cover",
    ),
    OwnFlag(
        "--save-every-minutes",
        ("--save-interval-minutes", "--save-interval-in-mins"),
        "save_every_minutes",
        "float",
        _RUN,
        "minutes between checkpoints by rank 0's clock; with --save-interval both count. One that "
        "is due shortly before an evaluation waits for it",
        "X",
        default="30; none where --save-interval is given",
    ),
    OwnFlag(
        "--keep-last",
        (),
        "keep_last",
        "int",
        _RUN,
        "keep the newest N checkpoints, and remove older ones once a newer one is whole; the best "
        "by validation loss and the last before a jump of loss or gradient norm stay as well",
        "N",
        default="all",
    ),
    OwnFlag(
        "--keep-every",
        (),
        "keep_every",
        "int",
        _RUN,
        "with --keep-last: keep checkpoints of steps that are a multiple of N, too",
        "N",
    ),
    OwnFlag(
        "--restart-schedule-at",
        (),
        "restart_schedule_at",
        "int",
        _RUN,
        "the learning rate's schedule begins anew at step N, warm-up and all, and ends with the "
        "run: for going on with a finished one; keep the flag at later starts",
        "N",
    ),
    OwnFlag(
        "--verify-checkpoint",
        (),
        "verify_checkpoint",
        "flag",
        _RUN,
        "before a start from a checkpoint: compare every byte of it with its checksum",
    ),
    OwnFlag(
        "--swanlab-project",
        (),
        "swanlab_project",
        "str",
        _RUN,
        "figures of every step also to SwanLab; to W&B with --wandb-project. Names: "
        "--swanlab-exp-name, --wandb-exp-name",
        "NAME",
    ),
    OwnFlag(
        "--swanlab-exp-name",
        (),
        "swanlab_exp_name",
        "str",
        _RUN,
        "name of the run in SwanLab",
        "NAME",
        default="that of --output-dir",
    ),
    OwnFlag(
        "--comm-check",
        (),
        "comm_check",
        "int",
        _RUN,
        "several nodes: how long all may take to be there before training, and to answer each "
        "other; 0 starts without looking",
        "SECONDS",
        default="60",
    ),
    OwnFlag(
        "--flight-recorder",
        ("--nccl-flight-recorder",),
        "flight_recorder",
        "int",
        _TOOL,
        "last collectives of each rank that PyTorch dumps to logs/nccl_trace_rank_N of the run "
        "when one runs into its time-out",
        "N",
        default="2000",
    ),
    OwnFlag("--dry-run", (), "dry_run", "flag", _TOOL, "print the plan and stop"),
    OwnFlag("--demo", (), "demo", "flag", _TOOL, "a tiny model on real text, on whatever is here"),
    OwnFlag("--json", (), "json", "flag", _TOOL, "machine-readable output of check and dry run"),
    OwnFlag(
        "--env",
        (),
        "env",
        "str",
        _TOOL,
        "environment the launcher found (single, torchrun, dlc, slurm, mpi)",
        "NAME",
    ),
    OwnFlag(
        "--device",
        (),
        "device",
        "str",
        _TOOL,
        "plan for this device",
        "NAME",
        choices=("cpu", "cuda", *DEVICES),
        default="what is here; check: h100",
    ),
    OwnFlag(
        "--gpu-memory", (), "gpu_memory", "float", _TOOL, "GiB of a GPU, instead of --device", "GIB"
    ),
    OwnFlag("--nodes", ("--nnodes",), "nodes", "int", _TOOL, "check: nodes", "N", default="1"),
    OwnFlag(
        "--gpus-per-node",
        ("--nproc-per-node",),
        "gpus_per_node",
        "int",
        _TOOL,
        "check: ranks a node",
        "N",
        default="8; 1 on CPU",
    ),
    OwnFlag("--world-size", (), "world_size", "int", _TOOL, "check: ranks in all", "N"),
    OwnFlag("--help", ("-h",), "help", "flag", _TOOL, "this text"),
    OwnFlag("--help-all", (), "help_all", "flag", _TOOL, "also Megatron's flags"),
)


@dataclass(frozen=True)
class OwnFlags:
    """Values of the flags that are not Megatron's; None or False where not given."""

    hf_model: str | None = None
    output_dir: str | None = None
    init_from: str | None = None
    train_tokens: int | None = None
    epochs: float | None = None
    parallel: str | None = None
    precision: str | None = None
    fp8: str | None = None
    backend: str | None = None
    linear_cross_entropy: str | None = None
    fused_kernels: str | None = None
    save_every_minutes: float | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    restart_schedule_at: int | None = None
    verify_checkpoint: bool = False
    flight_recorder: int | None = None
    swanlab_project: str | None = None
    swanlab_exp_name: str | None = None
    comm_check: int = 60
    cpu_offloading: bool = False
    cpu_offloading_optimizer: bool = False
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    sft: bool = False
    sft_loss_unit: str = "token"
    no_packing: bool = False
    pad_to_max_length: bool = False
    save_hf: str | None = None
    freeze: list[str] | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_target_modules: list[str] | None = None
    schema: str | None = None
    prompt_completion_as: str = "text"
    on_overlong: str = "drop"
    on_bad_line: str = "error"
    chat_template: str | None = None
    chat_template_kwargs: str = "{}"
    eod_token: str | None = None
    dry_run: bool = False
    demo: bool = False
    json: bool = False
    env: str | None = None
    device: str | None = None
    gpu_memory: float | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    world_size: int | None = None
    help: bool = False
    help_all: bool = False


# --- numbers ----------------------------------------------------------------------------------

#: Ranks, nodes and parallel sizes; layouts are searched up to it.
_MOST_RANKS = 1 << 20
#: One entry a layer is made in many places.
_MOST_LAYERS = 10_000
#: Upstream keeps sizes and ids in 32 bits, counts of samples and tokens in 64.
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1

_RANKS = Range(1, _MOST_RANKS)
_SIZE = Range(1, _INT32)
_STEPS = Range(1, _INT64)
_NONE_OR_MORE = Range(0, _INT64)
_POSITIVE = Range(0, above=True)
_NOT_NEGATIVE = Range(0)
_SHARE = Range(0, 1)
#: Averages over steps and rates of dropping: 1 would keep or drop everything.
_BELOW_ONE = Range(0, 1, below=True)

_ROWS: tuple[tuple[Range, str], ...] = (
    (
        _RANKS,
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size expert_tensor_parallel_size "
        "num_virtual_stages_per_pipeline_rank num_distributed_optimizer_instances nodes "
        "gpus_per_node world_size",
    ),
    (
        Range(1, _MOST_LAYERS),
        "num_layers encoder_num_layers decoder_num_layers num_layers_per_virtual_pipeline_stage "
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers recompute_num_layers",
    ),
    (Range(0, _MOST_LAYERS), "mtp_num_layers cpu_offloading_num_layers"),
    (
        _SIZE,
        "seq_length micro_batch_size global_batch_size eval_micro_batch_size "
        "eval_global_batch_size hidden_size ffn_hidden_size num_attention_heads num_query_groups "
        "kv_channels max_position_embeddings vocab_size padded_vocab_size "
        "make_vocab_size_divisible_by moe_ffn_hidden_size moe_shared_expert_intermediate_size "
        "moe_router_topk num_dataset_builder_threads dist_ckpt_workers rotary_base q_lora_rank "
        "kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim distributed_timeout_minutes "
        "hysteresis per_device_train_batch_size gradient_accumulation_steps lora_rank keep_last "
        "keep_every flight_recorder",
    ),
    (Range(1, 1 << 17), "num_experts"),
    (
        _STEPS,
        "train_tokens train_iters train_samples log_interval save_interval eval_interval "
        "lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples exit_interval "
        "exit_duration_in_mins tensorboard_log_interval save_retain_interval "
        "non_persistent_save_interval",
    ),
    (
        _NONE_OR_MORE,
        "lr_warmup_iters lr_warmup_samples eval_iters start_eval_at_iter num_workers "
        "manual_gc_interval rampup_batch_size null_tokenizer_eod_id comm_check",
    ),
    # Upstream refuses 0 with a traceback, and NumPy takes 32 bits with the stages' offsets added.
    (_SIZE, "seed"),
    (_POSITIVE, "epochs gpu_memory lora_alpha lr adam_eps layernorm_epsilon init_method_std"),
    (Range(0, 1e6, above=True), "save_every_minutes"),
    (_POSITIVE, "loss_scale initial_loss_scale min_loss_scale loss_scale_window"),
    (_POSITIVE, "moe_expert_capacity_factor rope_scaling_factor rotary_scaling_factor"),
    (
        _NOT_NEGATIVE,
        "min_lr lr_warmup_init decoupled_lr decoupled_min_lr weight_decay start_weight_decay "
        "end_weight_decay clip_grad moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps "
        "mtp_loss_scaling_factor mid_level_dataset_surplus moe_router_bias_update_rate",
    ),
    (
        _BELOW_ONE,
        "adam_beta1 adam_beta2 sgd_momentum muon_momentum lion_beta1 lion_beta2 hidden_dropout "
        "attention_dropout lr_warmup_fraction lora_dropout",
    ),
    (_SHARE, "optimizer_offload_fraction activation_offload_fraction"),
    (Range(0, 1, above=True), "rotary_percent"),
)

#: Dest -> what its number may be. A number without a row has to be finite and to fit 64 bits.
RANGES: Mapping[str, Range] = MappingProxyType(
    {dest: row for row, dests in _ROWS for dest in dests.split()}
)
_ANY = Range(-_INT64, _INT64)
_ANY_FLOAT = Range()


def number_problem(dest: str, value: Any) -> str | None:
    """What is needed in place of the number ``value`` of ``dest``; None where it will do."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return RANGES.get(dest, _ANY if isinstance(value, int) else _ANY_FLOAT).wanted(value)


# --- the option index and the parser ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Option:
    """What one spelling means: a target, how to read values, and a constant for on/off flags."""

    name: str
    dest: str
    own: bool
    kind: str
    nargs: int | str | None
    choices: tuple[Any, ...] | None
    const: Any = None
    megatron: str | None = None


@cache
def megatron_defaults() -> dict[str, Any]:
    """Megatron's default for every dest; treat as read-only."""
    defaults: dict[str, Any] = {}
    for flag in _compat.flag_table():
        defaults.setdefault(flag.dest, flag.default)
    return defaults


def _normalise(option: str) -> str:
    return option.replace("_", "-")


@cache
def _options() -> dict[str, _Option]:
    """Every accepted spelling (normalised) and what it means; ours shadow Megatron's."""
    index: dict[str, _Option] = {}
    negated: dict[str, _Option] = {}
    for flag in _compat.flag_table():
        first = flag.options[0]
        for text in flag.options:
            key = _normalise(text)
            if flag.action == "store":
                index[key] = _Option(
                    first, flag.dest, False, flag.type, flag.nargs, flag.choices, None, first
                )
                continue
            on = flag.action != "store_false"
            if flag.action == "boolean_optional" and text.startswith("--no-"):
                on = False
            index[key] = _Option(text, flag.dest, False, "flag", None, None, on, text)
            if flag.action == "store_true":
                other = f"--no-{key[2:]}"
            else:
                other = "--" + _normalise(flag.dest)
            negated.setdefault(other, _Option(other, flag.dest, False, "flag", None, None, not on))
    for key, option in negated.items():
        index.setdefault(key, option)
    by_dest = {f.dest: f for f in _compat.flag_table()}
    for own in OWN_FLAGS:
        megatron = by_dest.get(own.dest) if own.dest not in _OWN_FIELDS else None
        for text in (own.name, *own.aliases):
            index[_normalise(text)] = _Option(
                own.name,
                own.dest,
                own.dest in _OWN_FIELDS,
                "str" if own.kind == "list" else own.kind,
                "*" if own.kind == "list" else None,
                own.choices,
                True if own.kind == "flag" else None,
                megatron.options[0] if megatron else None,
            )
    return index


_OWN_FIELDS = frozenset(f.name for f in dataclasses.fields(OwnFlags))


@cache
def _flag_names() -> dict[str, str]:
    names = {f.dest: f.options[0] for f in reversed(_compat.flag_table())}
    names.update({o.dest: o.name for o in OWN_FLAGS})
    return names


def flag_name(dest: str) -> str:
    """The option to name in a message about ``dest``: ours where there is one."""
    return _flag_names().get(dest, "--" + _normalise(dest))


@dataclass
class Given:
    """One occurrence on the command line."""

    spelling: str
    option: _Option
    value: Any
    tokens: list[str]
    segment: int


def parse(argv: Sequence[str]) -> dict[str, Given]:
    """Read ``argv`` into the last word on each dest.

    Args:
        argv: Arguments without the program name.

    Returns:
        dest -> occurrence. Our own flags stand under their field name.

    Raises:
        UserError: Unknown flag (with the nearest names), a value missing, of the wrong type or not
            among the choices, a stray value, or two spellings of one setting that disagree.
    """
    found: dict[str, Given] = {}
    segment = 0
    position = 0
    index = _options()
    while position < len(argv):
        token = argv[position]
        position += 1
        if token == USER_FLAGS_MARK:
            segment += 1
            continue
        text, equals, attached = token.partition("=")
        option = index.get(_normalise(text)) if text.startswith("-") else None
        if option is None:
            raise _unknown(token, text, argv, position)
        tokens: list[str]
        if option.kind == "flag":
            if equals:
                raise UserError(
                    f"{text} takes no value, but {attached!r} was given; "
                    f"write {text} or --no-{text[2:]}"
                )
            given = Given(text, option, option.const, [], segment)
        else:
            tokens, position = _values(option, text, attached if equals else None, argv, position)
            read = [_convert(option, text, item) for item in tokens]
            value = read if option.nargs is not None else read[0]
            given = Given(text, option, value, tokens, segment)
        _merge(found, given)
    return found


def _values(
    option: _Option, text: str, attached: str | None, argv: Sequence[str], position: int
) -> tuple[list[str], int]:
    """The value tokens of ``option`` and the position after them."""
    tokens = [] if attached is None else [attached]
    if attached is None or option.nargs is not None:
        most = 1 if option.nargs is None else option.nargs if isinstance(option.nargs, int) else 0
        while position < len(argv) and not _is_flag(argv[position]):
            if most and len(tokens) == most:
                break
            tokens.append(argv[position])
            position += 1
    if isinstance(option.nargs, int) and len(tokens) != option.nargs:
        raise UserError(f"{text} takes {option.nargs} values, {len(tokens)} given")
    if not tokens and option.nargs != "*":
        raise UserError(f"{text} needs a value")
    return tokens, position


def _is_flag(token: str) -> bool:
    """Whether a token starts a flag; a negative number, or several, does not."""
    return token.startswith("-") and not re.match(r"-\.?\d", token)


def _unknown(token: str, text: str, argv: Sequence[str], position: int) -> UserError:
    if not text.startswith("-"):
        before = argv[position - 2] if position > 1 else None
        after = f" after {before}" if before else ""
        return UserError(
            f"{token!r}{after} is not a flag: every setting is named, see --help. "
            "Quote values that contain blanks"
        )
    close = difflib.get_close_matches(_normalise(text), _options(), n=3, cutoff=0.6)
    hint = f"; nearest: {', '.join(close)}" if close else "; --help and --help-all list all flags"
    return UserError(f"unknown flag {text}{hint}")


def _merge(found: dict[str, Given], given: Given) -> None:
    """Take the later word; two spellings that disagree within one segment are an error."""
    earlier = found.get(given.option.dest)
    if (
        earlier is not None
        and earlier.segment == given.segment
        and _normalise(earlier.spelling) != _normalise(given.spelling)
        and earlier.value != given.value
    ):
        one = f"{earlier.spelling} {' '.join(earlier.tokens)}".strip()
        two = f"{given.spelling} {' '.join(given.tokens)}".strip()
        raise UserError(f"{one} and {two} are the same setting with two values; keep one of them")
    found.pop(given.option.dest, None)
    found[given.option.dest] = given


_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def read_count(text: str) -> int:
    """``"1B"``, ``"1.5b"``, ``"2e9"``, ``"10_000"`` -> int; ValueError where it is not whole."""
    match = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*(?:[eE]\+?[0-9]+)?)([kKmMbBgGtT]?)", text.strip())
    if not match:
        raise ValueError(text)
    number = match[1].replace("_", "")
    scale = _SUFFIX[match[2].lower()]
    if number.isdigit():
        return int(number) * scale
    exact = float(number) * scale
    if not math.isfinite(exact) or exact != round(exact):
        raise ValueError(text)
    return round(exact)


#: More than any model has layers: a pattern is written out in memory.
_MOST_ENTRIES = 1 << 20


def read_pattern(text: str) -> int | list[Any]:
    """Megatron's layer pattern: ``"2"`` or a list expression such as ``"[0]*3+[1]*58"``.

    Only numbers, lists, ``+``, ``*`` and brackets are read.
    """

    def walk(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int()):
                return node.value
            case ast.List(elts=items):
                return [walk(item) for item in items]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return walk(left) + walk(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                factors = walk(left), walk(right)
                size = math.prod(len(f) if isinstance(f, list) else f for f in factors)
                if size <= _MOST_ENTRIES:
                    return factors[0] * factors[1]
        raise ValueError(text)

    try:
        value = walk(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as problem:
        raise ValueError(text) from problem
    if not isinstance(value, int | list):
        raise ValueError(text)
    return value


def _convert(option: _Option, text: str, token: str) -> Any:
    """One value token in the option's type."""
    readers: dict[str, tuple[Callable[[str], Any], str]] = {
        "int": (lambda t: int(t.replace("_", "")), "a whole number"),
        "float": (float, "a number"),
        "count": (read_count, "a count such as 1000, 10_000, 1.5B or 2e9"),
        "bool": (_read_bool, "true or false"),
        "tuple_type": (_read_pair, "two numbers such as 4096,0"),
        "moe_freq_type": (read_pattern, 'a number or a pattern such as "[0]*3+[1]*58"'),
        "la_freq_type": (read_pattern, 'a number or a pattern such as "[1,1,1,0]*12"'),
        "no_rope_freq_type": (read_pattern, 'a number or a pattern such as "[0,0,0,1]*8"'),
    }
    reader, wanted = readers.get(option.kind, (str, "text"))
    try:
        value = reader(token)
    except ValueError as problem:
        raise UserError(f"{text} {_short(token)}: {wanted} is needed") from problem
    if needed := number_problem(option.dest, value):
        raise UserError(f"{text} {_short(token)}: {needed} is needed")
    if option.choices and value not in option.choices:
        allowed = ", ".join(str(c) for c in option.choices)
        raise UserError(f"{text} {token}: not one of {allowed}")
    return value


def _short(token: str) -> str:
    """A value for a message, which thousands of digits would drown."""
    return token if len(token) <= 60 else f"{token[:40]}... ({len(token)} characters)"


def _read_bool(token: str) -> bool:
    if token.lower() in ("true", "1", "yes", "on"):
        return True
    if token.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError(token)


def _read_pair(token: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.split(r"[,\s]+", token.strip("() ")))
