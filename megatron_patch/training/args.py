"""The resolver and the plan of a run. Standard library and our modules only.

A run is described by named flags (`flags.py`). :func:`resolve` joins the layers

    command line > ``--parallel auto`` > CPU platform > model config > launch default > Megatron

into a :class:`Plan` that keeps, for every value, where it came from. Nothing here imports torch,
megatron or transformers: help, dry run and ``check`` answer at once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_patch import _compat
from megatron_patch.data import blend
from megatron_patch.patches.tracker_file import TRACKER
from megatron_patch.training import resume, saves
from megatron_patch.training.flags import (
    DEVICES,
    FINE_TUNING,
    FP8_RECIPES,
    OWN_FLAGS,
    Given,
    OwnFlags,
    flag_name,
    megatron_defaults,
    number_problem,
    parse,
)
from megatron_patch.util import UserError, column, human_count

if TYPE_CHECKING:
    from megatron_patch.convert.plan import Source
    from megatron_patch.models.family import ModelSpec

# Where a value came from, as written to Plan.source, strongest first.
COMMAND_LINE = "command line"
AUTO = "--parallel auto"
CPU_PLATFORM = "cpu platform"
MODEL_CONFIG = "model config"
LAUNCH_DEFAULT = "launch default"
MEGATRON_DEFAULT = "Megatron default"
EVALUATION_OFF = "evaluation off"


@dataclass(frozen=True, slots=True)
class Environment:
    """What can be imported where the run happens; decides a few launch defaults.

    Attributes:
        te: Transformer Engine.
        deep_ep: DeepEP's dispatcher for expert parallelism.
        resiliency: nvidia-resiliency-ext, which has a checkpoint writer.
        assumed: True where the run happens elsewhere and this is what a GPU image has.
    """

    te: bool
    deep_ep: bool
    assumed: bool = False
    resiliency: bool = False

    @classmethod
    def detect(cls) -> Environment:
        """Look for the packages without importing them."""

        def there(module: str) -> bool:
            return importlib.util.find_spec(module) is not None

        return cls(
            te=there("transformer_engine"),
            deep_ep=there("deep_ep"),
            resiliency=there("nvidia_resiliency_ext"),
        )


@dataclass(frozen=True, slots=True)
class RunLength:
    """The run's length in all four units.

    Attributes:
        iters: Steps.
        samples: Sequences of ``seq_length`` tokens.
        tokens: ``samples x seq_length``.
        epochs: Passes over the training data, None where the data is not there to be counted.
        asked: The flag that set it, as given.
        data_tokens: Tokens of one epoch, or None.
    """

    iters: int
    samples: int
    tokens: int
    epochs: float | None
    asked: str
    data_tokens: int | None


@dataclass
class Plan:
    """A resolved run.

    Attributes:
        values: Every Megatron dest after precedence; enum members by name.
        source: For every dest, one of the source names of this module, perhaps with a detail.
        own: Our own flags.
        model: The family's answer to config.json; None without ``--hf-model``.
        notes: What was defaulted, converted or overruled, to be printed.
        run: Run length in all units; None for a dry question without one (see :func:`resolve`).
        world_size: Ranks planned for.
        device: ``cpu``, ``cuda`` or a key of :data:`DEVICES`.
        environment: What the defaults were based on.
        linear_cross_entropy: Whether output layer and loss are one operation.
        ends: Ids that end a document, as config.json has them.
        order: What decides the order of the data, where that is not Megatron's: the entry point's
            own, JSON-able, kept for the next start of the run.
        start: The checkpoint that the run goes on from; None for a new run.
        weights: Hugging Face files that a new run starts from.
        validation_sets: Names of the validation sets that have a loss each.
        validation_whole: Each of them is read whole, not up to ``eval_iters`` steps.
    """

    values: dict[str, Any]
    source: dict[str, str]
    own: OwnFlags
    model: ModelSpec | None
    notes: list[str]
    run: RunLength | None
    world_size: int
    device: str
    environment: Environment
    linear_cross_entropy: bool = False
    ends: tuple[int, ...] = ()
    order: dict[str, Any] | None = None
    start: resume.Start | None = None
    weights: Source | None = None
    validation_sets: tuple[str, ...] = ()
    validation_whole: bool = False
    _raw: dict[str, list[str]] = field(default_factory=dict, repr=False)

    def megatron_argv(self) -> list[str]:
        """The user's Megatron flags under their canonical names, for Megatron's own parser.

        Together with :meth:`overlay` given to ``parser.set_defaults`` they yield :attr:`values`.
        """
        argv: list[str] = []
        for dest, raw in self._raw.items():
            if self.source[dest] == COMMAND_LINE:
                argv += raw
        return argv

    def overlay(self) -> dict[str, Any]:
        """Values that differ from Megatron's defaults and are not in :meth:`megatron_argv`."""
        defaults = megatron_defaults()
        in_argv = {d for d in self._raw if self.source[d] == COMMAND_LINE}
        return {
            dest: value
            for dest, value in self.values.items()
            if dest not in in_argv and value != defaults[dest]
        }

    @property
    def data(self) -> blend.Sources:
        """The data sets, by split."""
        return blend.sources(self.values)

    @property
    def readings(self) -> list[blend.Reading]:
        """How often the run reads each of its data sets; nothing without a length, or for chats."""
        if self.run is None or self.own.sft:
            return []
        return blend.readings(self.data, self.run.tokens)

    def given(self, dest: str) -> bool:
        """Whether the user's command line set ``dest``."""
        return self.source[dest].startswith(COMMAND_LINE)

    @property
    def save_minutes(self) -> float | None:
        """Minutes between checkpoints; None where steps alone decide, or nothing is saved."""
        if not self.own.output_dir:
            return None
        if self.own.save_every_minutes is not None:
            return self.own.save_every_minutes
        return None if self.given("save_interval") else saves.MINUTES

    @property
    def data_parallel_size(self) -> int:
        """World size over TP x PP x CP; 1 at least, also where it does not divide."""
        return max(1, self.world_size // _model_parallel(self.values))

    def describe(self) -> str:
        """The resolved plan as text: every value that is not Megatron's default, and its source."""
        defaults = megatron_defaults()
        rows = [
            (dest, _show(value), self.source[dest])
            for dest, value in sorted(self.values.items())
            if value != defaults[dest] or self.given(dest)
        ]
        width = max((len(r[0]) for r in rows), default=0)
        middle = min(48, max((len(r[1]) for r in rows), default=0))
        lines = [f"{n:<{width}}  {v:<{middle}}  {s}" for n, v, s in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, written as ``resolved_args.json``."""
        return {
            "values": self.values,
            "source": {d: s for d, s in self.source.items() if s != MEGATRON_DEFAULT},
            "own": dataclasses.asdict(self.own),
            "notes": self.notes,
            "run": dataclasses.asdict(self.run) if self.run else None,
            "order": self.order,
            "rope": dataclasses.asdict(self.model.rope) if self.model else None,
            "world_size": self.world_size,
            "device": self.device,
            "linear_cross_entropy": self.linear_cross_entropy,
        }


class Epochs(Protocol):
    """How long an epoch of fine-tuning is; known once the data is tokenized and packed."""

    def steps(self, epochs: float) -> int:
        """Steps of so many epochs."""

    def epochs(self, steps: int) -> float:
        """Epochs of so many steps."""

    @property
    def tokens(self) -> int:
        """Tokens of an epoch, without padding."""


# --- launch defaults --------------------------------------------------------------------------


class _Skip:
    """Answer of a default that does not apply."""


SKIP = _Skip()


@dataclass(frozen=True)
class Context:
    """What a launch default may look at: values of the stronger layers and the surroundings."""

    values: Mapping[str, Any]
    given: frozenset[str]
    own: OwnFlags
    device: str
    world_size: int
    environment: Environment

    @property
    def gpu(self) -> bool:
        """True unless the run is on CPU ranks."""
        return self.device != "cpu"

    @property
    def sft(self) -> bool:
        """True for fine-tuning on chats."""
        return self.own.sft

    @property
    def moe(self) -> bool:
        """True for a mixture-of-experts model."""
        return bool(self.values["num_experts"])

    @property
    def validation(self) -> bool:
        """True where the user asked for evaluation or gave validation data."""
        asked = {"eval_iters", "full_validation"} & self.given
        if "split" in self.given and self.values["split"] is not None:
            asked |= {"split"} if any(blend.read_split(self.values["split"])[1:]) else set()
        return bool(
            self.values["valid_data_path"]
            or self.values["per_split_data_args_path"]
            or (asked and self.values["eval_iters"] != 0)
        )


@dataclass(frozen=True, slots=True)
class Default:
    """A launch default: ``value`` or, where callable, what it returns for a :class:`Context`."""

    dest: str
    value: Any
    reason: str


def _precision_flag(name: str) -> Callable[[Context], Any]:
    return lambda c: (
        SKIP if {"bf16", "fp16"} & c.given else (c.own.precision or _default_precision(c)) == name
    )


def _default_precision(c: Context) -> str:
    return "bf16" if c.gpu else "fp32"


def _deepep(c: Context) -> bool:
    return c.gpu and c.environment.deep_ep and c.values["expert_model_parallel_size"] > 1


#: One table, in the order in which it is applied (a later row may look at an earlier one).
def _nothing_to_reduce(c: Context) -> bool:
    """One replica of everything: overlapping its collectives with itself costs launches only."""
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return not c.moe and c.world_size == math.prod(c.values[d] for d in degrees)


LAUNCH_DEFAULTS: tuple[Default, ...] = (
    Default(
        "micro_batch_size",
        1,
        "the smallest that always works; on a GPU a dense model with --global-batch-size takes the "
        "largest of 2, 4 and 8 that fits",
    ),
    Default("log_interval", 1, "every step is logged"),
    Default("log_throughput", True, "TFLOP/s a GPU on every line"),
    Default(
        "create_attention_mask_in_dataloader",
        False,
        "a float mask of [s, s] a sample; causal attention needs none",
    ),
    Default(
        "use_distributed_optimizer",
        lambda c: SKIP if c.values["use_torch_fsdp2"] else True,
        "optimizer state is sharded over the data-parallel ranks",
    ),
    Default(
        "overlap_grad_reduce",
        lambda c: SKIP if c.values["use_torch_fsdp2"] or _nothing_to_reduce(c) else True,
        "gradient reduction runs beside the backward pass, where there is another replica",
    ),
    Default(
        "overlap_param_gather",
        lambda c: (
            SKIP
            if c.values["save_params_interval"]
            or c.values["freeze_all_layers"]
            or not (c.values["use_distributed_optimizer"] and c.values["overlap_grad_reduce"])
            else True
        ),
        "parameter gathering runs beside the forward pass",
    ),
    Default(
        "sequence_parallel",
        lambda c: c.values["tensor_model_parallel_size"] > 1,
        "norms and dropout split over TP: less memory, and MoE with TP needs it",
    ),
    Default(
        "expert_tensor_parallel_size",
        lambda c: 1 if c.moe and c.values["tensor_model_parallel_size"] > 1 else SKIP,
        "experts are small: splitting one costs more than it saves",
    ),
    Default(
        "moe_token_dispatcher_type",
        lambda c: SKIP if not c.moe else "flex" if _deepep(c) else "alltoall",
        "alltoall sends each token only where it goes; flex where DeepEP is installed",
    ),
    Default(
        "moe_flex_dispatcher_backend",
        lambda c: "deepep" if c.moe and _deepep(c) else SKIP,
        "DeepEP is installed and experts are spread over ranks",
    ),
    Default(
        "moe_grouped_gemm",
        lambda c: c.gpu and c.environment.te if c.moe else SKIP,
        "one kernel for all experts of a rank; needs Transformer Engine",
    ),
    Default(
        "moe_permute_fusion",
        lambda c: c.gpu and c.environment.te if c.moe else SKIP,
        "fused permutation of tokens; needs Transformer Engine",
    ),
    Default(
        "moe_router_dtype",
        lambda c: "fp32" if c.moe else SKIP,
        "routing probabilities in fp32, as the reference models have them; DeepEP needs it",
    ),
    Default(
        "cross_entropy_loss_fusion", True, "saves several passes over the logits (native kernel)"
    ),
    Default(
        "gradient_accumulation_fusion",
        lambda c: c.gpu,
        "weight gradients are added into the fp32 buffer by the matrix product itself",
    ),
    Default(
        "apply_rope_fusion",
        lambda c: SKIP if c.environment.te else False,
        "the fused kernel is Transformer Engine's",
    ),
    Default("bf16", _precision_flag("bf16"), "bf16 on GPU, fp32 on CPU ranks"),
    Default("fp16", _precision_flag("fp16"), "see --precision"),
    Default(
        "initial_loss_scale",
        lambda c: 1024.0 if c.values["fp16"] else SKIP,
        "losses are sums over tokens: from 2^32 on down the first twenty steps would be skipped",
    ),
    Default(
        "attention_dropout", 0.0, "pretraining without dropout; a non-zero rate also moves with TP"
    ),
    Default("hidden_dropout", 0.0, "as attention_dropout"),
    Default(
        "bias_dropout_fusion",
        lambda c: SKIP if c.values["hidden_dropout"] or c.values["add_bias_linear"] else False,
        "without bias and dropout a plain sum is left: nothing to compile at every start",
    ),
    Default(
        "calculate_per_token_loss",
        True,
        "every supervised token weighs the same, whatever the micro batch, rank or pack it is in",
    ),
    Default(
        "weight_decay", lambda c: 0.0 if c.sft else 0.1, "usual for pretraining; none in --sft"
    ),
    Default("adam_beta2", lambda c: 0.999 if c.sft else 0.95, "usual for pretraining; --sft 0.999"),
    Default("lr_decay_style", "cosine", "over the whole run"),
    Default(
        "min_lr",
        lambda c: 0.0 if c.sft else float(f"{c.values['lr'] / 10:.9g}") if c.values["lr"] else SKIP,
        "a tenth of the peak; --sft: 0",
    ),
    Default(
        "lr_warmup_fraction",
        lambda c: SKIP if not c.sft or {"lr_warmup_iters", "lr_warmup_samples"} & c.given else 0.03,
        "--sft only: the run is short, and its length is known once the data is packed",
    ),
    Default(
        "eval_iters",
        lambda c: 20 if c.validation else 0,
        "evaluation only where there is validation data",
    ),
    Default(
        "multiple_validation_sets",
        lambda c: True if c.values["full_validation"] else SKIP,
        "upstream reads a whole validation set only on its path for several of them",
    ),
    Default("eval_interval", 500, "upstream divides by it, also with evaluation off"),
    Default(
        "split",
        lambda c: (
            SKIP
            if c.values["train_data_path"] or c.values["per_split_data_args_path"]
            else "99,1,0"
            if c.values["eval_iters"]
            else "100,0,0"
        ),
        "all data trains unless evaluation is on",
    ),
    Default(
        "tokenizer_type",
        lambda c: SKIP if c.values["tokenizer_model"] else "NullTokenizer",
        "indexed data holds ids: training needs no tokenizer",
    ),
    Default("ckpt_format", "torch_dist", "does not depend on the layout"),
    Default(
        "dist_ckpt_optim_fully_reshardable", True, "the only format that resumes at another TP/PP"
    ),
    Default(
        "dist_ckpt_strictness",
        "raise_all",
        "weights are the model's, no more and no less; what holds none may be absent "
        "(patches/strict_load.py)",
    ),
    Default(
        "override_opt_param_scheduler",
        lambda c: SKIP if c.values["use_checkpoint_opt_param_scheduler"] else True,
        "on resume the command line's schedule counts: a longer run extends a finished one",
    ),
    Default(
        "check_for_nan_in_loss_and_grad",
        lambda c: SKIP if c.values["fp16"] or "rerun_mode" in c.given else False,
        "a step whose loss or gradient norm is no number ends the run all the same, before "
        "anything is saved; a look at every micro-batch and bucket makes the device wait for it",
    ),
    Default(
        "rerun_mode",
        lambda c: SKIP if c.own.output_dir else "disabled",
        "a step that gave NaN is saved and run again; without --output-dir there is nowhere to",
    ),
    Default(
        "use_persistent_ckpt_worker",
        lambda c: True if c.values["async_save"] else SKIP,
        "upstream switches --async-save off without it",
    ),
    Default(
        "async_strategy",
        lambda c: "mcore" if c.values["async_save"] and not c.environment.resiliency else SKIP,
        "nvrx is nvidia-resiliency-ext's writer, which is not installed",
    ),
    Default(
        "exit_signal_handler",
        lambda c: True if c.own.output_dir else SKIP,
        "SIGTERM saves a checkpoint and ends the run; its command goes on from there",
    ),
    Default(
        "profile_ranks",
        lambda c: [0] if c.values["profile"] else SKIP,
        "a trace of every rank would fill the disk",
    ),
    Default("manual_gc", True, "all ranks collect at the same step, so none waits for another"),
    Default("manual_gc_interval", 100, "see manual_gc"),
    Default(
        "distributed_timeout_minutes",
        30,
        "rank 0 builds the index of a long data set while the others wait",
    ),
)

#: What CPU ranks need; stronger than the model config, weaker than the command line.
CPU_DEFAULTS: tuple[Default, ...] = (
    Default("distributed_backend", "gloo", "NCCL needs GPUs"),
    Default("apply_rope_fusion", False, "CUDA kernel"),
    Default("masked_softmax_fusion", False, "CUDA kernel"),
    Default("bias_gelu_fusion", False, "compiled for CUDA"),
    Default("bias_swiglu_fusion", False, "compiled for CUDA"),
    Default("bias_dropout_fusion", False, "compiled for CUDA"),
    Default("no_persist_layer_norm", True, "CUDA kernel"),
    Default("gradient_accumulation_fusion", False, "CUDA kernel"),
    Default("cross_entropy_loss_fusion", False, "compiled for CUDA"),
    Default("moe_grouped_gemm", False, "CUDA kernel"),
    Default("moe_permute_fusion", False, "CUDA kernel"),
    Default("num_workers", 0, "few cores: a loader process costs more than it brings"),
    Default("log_throughput", False, "the figure is about GPUs"),
)


# --- resolve ----------------------------------------------------------------------------------


def resolve(
    argv: Sequence[str],
    *,
    world_size: int | None = None,
    device: str | None = None,
    environment: Environment | None = None,
    multicast: Callable[[], bool] | None = None,
    need_length: bool = True,
    data: Epochs | None = None,
) -> Plan:
    """Turn a command line into a plan. Reads config.json and data indices, imports nothing heavy.

    Args:
        argv: Arguments without the program name.
        world_size: Ranks of the run. Default: ``--world-size``, else ``--nodes`` x
            ``--gpus-per-node``, else 8 (1 on CPU).
        device: ``cpu``, ``cuda`` or a key of :data:`DEVICES`; ``--device`` by default, else
            ``cuda`` where a GPU driver is loaded, else ``h100``.
        environment: What is importable; by default looked up where the run is on this machine,
            assumed to be a full GPU image where it is elsewhere.
        multicast: Asks the hardware whether TP communication overlap can run; may raise. Called
            only where the user asked for that overlap.
        need_length: Insist on a run length.
        data: Fine-tuning only: how long an epoch is. Without it a length in epochs stays open.

    Returns:
        The plan. Whether it fits and divides is :func:`megatron_patch.training.parallel.check`'s
        question.

    Raises:
        UserError: Anything in the user's words that does not make a plan.
    """
    if argv and not argv[0].startswith("-"):
        from megatron_patch.training import legacy

        raise UserError(legacy.answer(argv))
    found = parse(argv)
    own = OwnFlags(**{d: g.value for d, g in found.items() if g.option.own})
    device = _device(own, device)
    environment = _backend(environment or _environment(device), own.backend, device)
    world_size = _world_size(own, device, world_size)
    rest = (device, environment, world_size, multicast, need_length, data)
    plan = _join(found, own, {}, *rest)
    offloads = own.cpu_offloading or own.cpu_offloading_optimizer
    if own.parallel == "auto":
        from megatron_patch.training import parallel

        chosen, why = parallel.auto_layout(plan)
        plan = _join(found, own, {AUTO: chosen}, *rest)
        plan.notes += why
    elif (
        device != "cpu"
        and not (own.sft or offloads)
        and plan.source["micro_batch_size"] == LAUNCH_DEFAULT
    ):
        from megatron_patch.training import parallel

        if micro := parallel.largest_micro_batch(plan):
            layer = {f"{LAUNCH_DEFAULT} (the largest that fits)": {"micro_batch_size": micro}}
            plan = _join(found, own, layer, *rest)
    if offloads:
        from megatron_patch.training import parallel

        moved, why = parallel.auto_offload(plan)
        for dest, value in moved.items():
            plan.values[dest], plan.source[dest] = value, f"{COMMAND_LINE} (offloading as needed)"
        plan.notes += why
    return plan


def _join(
    found: dict[str, Given],
    own: OwnFlags,
    auto: Mapping[str, Mapping[str, Any]],
    device: str,
    environment: Environment,
    world_size: int,
    multicast: Callable[[], bool] | None,
    need_length: bool,
    data: Epochs | None,
) -> Plan:
    """Lay the layers over each other, weakest first."""
    values = dict(megatron_defaults())
    source = dict.fromkeys(values, MEGATRON_DEFAULT)
    plan = Plan(values, source, own, None, [], None, world_size, device, environment)
    user = {d: g for d, g in found.items() if not g.option.own}

    def put(layer: Mapping[str, Any], name: str) -> None:
        for dest, value in layer.items():
            if dest not in values:
                raise UserError(f"{name} sets {dest!r}, which is not a dest of Megatron's parser")
            values[dest], source[dest] = value, name

    if own.hf_model:
        plan.model, plan.ends = _model(own.hf_model)
        for dest, value in plan.model.args.items():
            if needed := number_problem(dest, value):
                where = f"{own.hf_model}/config.json"
                raise UserError(f"{where} makes {flag_name(dest)} {value}; {needed} is needed")
        put(plan.model.args, MODEL_CONFIG)
        plan.notes += plan.model.notes
        for dest, given in user.items():
            if dest in plan.model.args and plan.model.args[dest] != given.value:
                plan.notes.append(
                    f"{given.spelling} {_show(given.value)} overrules {own.hf_model}/config.json, "
                    f"which says {_show(plan.model.args[dest])}"
                )
    if device == "cpu":
        put({d.dest: d.value for d in CPU_DEFAULTS}, CPU_PLATFORM)
    for name, chosen in auto.items():
        put(chosen, name)
    for dest, given in user.items():
        values[dest], source[dest] = given.value, COMMAND_LINE
        if given.option.megatron is not None and given.option.kind != "bool":
            plan._raw[dest] = [given.option.megatron, *_megatron_tokens(given)]
        else:
            # Megatron's parser cannot say it; it travels in the overlay.
            source[dest] = f"{COMMAND_LINE} ({given.spelling})"

    rate = user.get("lr")
    random = not (own.init_from or own.sft or plan.given("load"))
    if (
        random
        and rate is not None
        and rate.segment < max(g.segment for g in user.values())
        and rate.value < 1e-4
    ):
        plan.notes.append(
            f"--lr {rate.value:g} is the launcher's: right for going on from trained weights; from "
            "random ones 1e-4 to 1e-3 is usual"
        )
    changes, plan.validation_sets, plan.validation_whole = blend.validation(values)
    put(changes, f"{COMMAND_LINE} (data)")
    if plan.validation_sets and own.sft:
        raise UserError(
            "--valid-data-path: fine-tuning evaluates one set; give its paths without names"
        )
    changes, notes = blend.tidy(values)
    put(changes, f"{COMMAND_LINE} (data)")
    plan.notes += notes
    if values["data_path"] and (values["valid_data_path"] or values["test_data_path"]):
        # Megatron takes no further files beside --data-path, only beside this one.
        moved = {"train_data_path": values["data_path"], "data_path": None}
        put(moved, f"{COMMAND_LINE} (--data-path)")
    changes, notes = blend.weighed(values, bool(plan.validation_sets))
    put(changes, f"{COMMAND_LINE} (data)")
    plan.notes += notes
    _own_to_megatron(plan, put)
    if own.sft:
        _fine_tuning(plan, put)
    else:
        for flag in OWN_FLAGS:
            if flag.group == FINE_TUNING and flag.dest in found:
                raise UserError(f"{found[flag.dest].spelling} has no effect without --sft")
    _per_device(plan, found, put)
    _launch_defaults(plan, frozenset(user), put)
    _evaluation(plan, put)
    _tokenizer(plan, put)
    _tp_overlap(plan, multicast)
    _linear_cross_entropy(plan)
    _directories(plan, put)
    _length(plan, found, need_length, put, data)
    return plan


def _megatron_tokens(given: Given) -> list[str]:
    """Value tokens as Megatron's parser reads them (counts and digit groups written out)."""
    if given.option.kind in ("count", "int") and not isinstance(given.value, list):
        return [str(given.value)]
    return given.tokens


def _device(own: OwnFlags, device: str | None) -> str:
    if own.device and device and own.device != device and "cpu" in (own.device, device):
        raise UserError(f"--device {own.device}, but this run is on {device}; drop --device")
    if own.device and own.device != "cuda":
        return own.device
    if device:
        return device
    if own.device == "cuda" or Path("/proc/driver/nvidia/version").exists():
        return "cuda"
    return "h100"


def _backend(environment: Environment, backend: str | None, device: str) -> Environment:
    """What ``--backend`` makes of the installed packages."""
    if backend == "te" and not environment.te:
        where = "is for GPUs" if device == "cpu" else "is not installed"
        raise UserError(
            f"--backend te: Transformer Engine {where}; install the extra te-cu12 or te-cu13 of "
            "your CUDA, or leave the flag out"
        )
    return dataclasses.replace(environment, te=False) if backend == "torch" else environment


def _environment(device: str) -> Environment:
    if device == "cpu":
        return Environment(te=False, deep_ep=False)
    if Path("/proc/driver/nvidia/version").exists():
        return Environment.detect()
    return Environment(te=True, deep_ep=False, assumed=True)


def _world_size(own: OwnFlags, device: str, world_size: int | None) -> int:
    per_node = own.gpus_per_node or (1 if device == "cpu" else 8)
    product = (own.nodes or 1) * per_node
    if own.world_size and (own.nodes or own.gpus_per_node) and own.world_size != product:
        raise UserError(
            f"--world-size {own.world_size} against {own.nodes or 1} nodes x {per_node} ranks = "
            f"{product}; give one of the two"
        )
    asked = own.world_size or (product if own.nodes or own.gpus_per_node else None)
    if world_size is not None and asked is not None and asked != world_size:
        raise UserError(f"{asked} ranks asked for, but this run has {world_size}; drop the flag")
    return world_size or asked or product


def _model(directory: str) -> tuple[ModelSpec, tuple[int, ...]]:
    """The family's answer to ``directory``/config.json and the ids that end a document."""
    from megatron_patch.models import registry

    hf = registry.load_config(directory)
    spec = registry.get_family(hf.model_type).resolve(hf)
    eos = hf.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return spec, tuple(i for i in ids if isinstance(i, int))


def _own_to_megatron(plan: Plan, put: Callable[[Mapping[str, Any], str], None]) -> None:
    """What ``--precision``, ``--fp8``, ``--vpp`` and the offloading flags mean to Megatron."""
    own, values = plan.own, plan.values
    for name in ("bf16", "fp16"):
        if own.precision and values[name] and own.precision != name:
            raise UserError(f"--precision {own.precision} and --{name} contradict each other")
    if values["bf16"] and values["fp16"]:
        raise UserError("--bf16 and --fp16 contradict each other; use --precision")
    if own.fp8:
        recipe, form, *_ = FP8_RECIPES[own.fp8]
        for dest, wanted in (("fp8_recipe", recipe), ("fp8", form)):
            if plan.given(dest) and values[dest] != wanted:
                raise UserError(
                    f"--fp8 {own.fp8} means {_megatron_option(dest)} {wanted}, but "
                    f"{_megatron_option(dest)} {values[dest]} is given; keep one of them"
                )
            if not plan.given(dest):
                put({dest: wanted}, f"{COMMAND_LINE} (--fp8 {own.fp8})")
    if own.cpu_offloading and not plan.given("cpu_offloading_num_layers"):
        layers = (values["num_layers"] or 2) - 1
        put({"cpu_offloading_num_layers": layers}, f"{COMMAND_LINE} (--cpu-offloading)")
    if own.cpu_offloading_optimizer:
        wanted_true = (
            "optimizer_cpu_offload",
            "use_precision_aware_optimizer",
            "overlap_cpu_optimizer_d2h_h2d",
        )
        for dest in wanted_true:
            if not plan.given(dest):
                put({dest: True}, f"{COMMAND_LINE} (--cpu-offloading-optimizer)")


#: The longest sequence of fine-tuning that nobody asked for.
SFT_LENGTH = 4096


def _fine_tuning(plan: Plan, put: Callable[[Mapping[str, Any], str], None]) -> None:
    """What fine-tuning sets before the launch defaults; the rest comes with its data."""
    values = plan.values
    own = plan.own
    if own.lora_rank is None:
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
            if getattr(own, name) != getattr(OwnFlags(), name):
                raise UserError(f"{flag_name(name)} has no effect without --lora-rank")
    elif own.freeze:
        raise UserError("--freeze has no effect with --lora-rank, which freezes every weight")
    if plan.own.pad_to_max_length and not plan.own.no_packing:
        raise UserError("--pad-to-max-length has no effect without --no-packing; packs are full")
    if not values["seq_length"]:
        longest = values["max_position_embeddings"] or SFT_LENGTH
        put({"seq_length": min(longest, SFT_LENGTH)}, LAUNCH_DEFAULT)
        plan.notes.append(
            f"--seq-length {values['seq_length']}: the model's {longest} positions, at most "
            f"{SFT_LENGTH} by default"
        )


def _per_device(
    plan: Plan, found: Mapping[str, Given], put: Callable[[Mapping[str, Any], str], None]
) -> None:
    """The global batch from sequences a replica takes and the steps it accumulates."""
    own, values = plan.own, plan.values
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    asked = [found[name] for name in names if name in found]
    if not asked:
        return
    said = " ".join(f"{g.spelling} {g.value}" for g in asked)
    for given in asked:
        if given.value < 1:
            raise UserError(f"{given.spelling} {given.value}: at least 1 is needed")
    segment = max(given.segment for given in asked)
    for dest in ("global_batch_size", *(() if own.sft else ("micro_batch_size",))):
        other = found.get(dest)
        if (
            other is not None
            and other.segment >= segment
            and (dest != "micro_batch_size" or own.per_device_train_batch_size)
        ):
            raise UserError(
                f"{said} and {other.spelling} {other.value} both set the batch; keep one of them"
            )
    size = own.per_device_train_batch_size or values["micro_batch_size"] or 1
    if not own.sft and own.per_device_train_batch_size:
        put({"micro_batch_size": size}, f"{COMMAND_LINE} ({said})")
    steps, replicas = own.gradient_accumulation_steps or 1, plan.data_parallel_size
    put({"global_batch_size": size * steps * replicas}, f"{COMMAND_LINE} ({said})")
    tp, pp, cp = (
        values[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context")
    )
    plan.notes.append(
        f"a step takes {size * steps * replicas} sequences: {size} a replica x {steps} "
        f"accumulation steps x {replicas} data-parallel replicas ({plan.world_size} ranks / "
        f"TP {tp} x PP {pp} x CP {cp}); the device of --per-device-train-batch-size is a replica"
    )


def _megatron_option(dest: str) -> str:
    return next(f.options[0] for f in _compat.flag_table() if f.dest == dest)


def _launch_defaults(
    plan: Plan, given: frozenset[str], put: Callable[[Mapping[str, Any], str], None]
) -> None:
    """Apply :data:`LAUNCH_DEFAULTS` where no stronger layer spoke."""
    context = Context(plan.values, given, plan.own, plan.device, plan.world_size, plan.environment)
    for row in LAUNCH_DEFAULTS:
        if plan.source[row.dest] != MEGATRON_DEFAULT:
            continue
        value = row.value(context) if callable(row.value) else row.value
        if value is not SKIP:
            put({row.dest: value}, LAUNCH_DEFAULT)
    if plan.values["moe_token_dispatcher_type"] == "flex" and not plan.given(
        "moe_token_dispatcher_type"
    ):
        plan.notes.append("DeepEP is installed: the flex dispatcher uses it")


def _evaluation(plan: Plan, put: Callable[[Mapping[str, Any], str], None]) -> None:
    """Every split that is read holds a sample; else evaluation is off, or an error.

    Raises:
        UserError: The training split, or a split that the user asked for, is empty.
    """
    values = plan.values
    found = plan.data
    short = blend.empty(found, values["seq_length"]) if values["seq_length"] else {}
    if not short:
        return
    if 0 in short:
        raise UserError(
            f"{found.flags[0]}: {short[0]}; more data"
            + (", a larger share of --split" if found.shares else "")
            + f" or a shorter --seq-length than {values['seq_length']} is needed"
        )
    number, why = min(short.items())
    if plan.source["split"] == LAUNCH_DEFAULT:
        put({"eval_iters": 0, "split": "100,0,0"}, EVALUATION_OFF)
        plan.notes.append(f"evaluation off: {why}; --split or --valid-data-path would give it more")
    elif found.shares:
        raise UserError(
            f"--split {values['split']}: {why}; give it a larger share, or none "
            "(--split 100,0,0: no evaluation)"
        )
    else:
        raise UserError(f"{found.flags[number]}: {why}; give more data, or drop the flag")


def _tokenizer(plan: Plan, put: Callable[[Mapping[str, Any], str], None]) -> None:
    """Give the id-only tokenizer its vocabulary and the end of a document."""
    values = plan.values
    eos = plan.ends[0] if plan.ends else None
    if values["tokenizer_type"] != "NullTokenizer":
        return
    if values["vocab_size"] is None and values["padded_vocab_size"] is not None:
        put({"vocab_size": values["padded_vocab_size"]}, LAUNCH_DEFAULT)
    users = [
        d
        for d in (
            "eod_mask_loss",
            "reset_position_ids",
            "reset_attention_mask",
            "dataloader_inter_document_masking",
        )
        if values[d]
    ]
    if values["null_tokenizer_eod_id"] is None and eos is not None:
        put({"null_tokenizer_eod_id": eos}, MODEL_CONFIG)
        if users:
            plan.notes.append(
                f"{flag_name(users[0])}: a document ends with id {eos} (eos_token_id of "
                "config.json); --null-tokenizer-eod-id N where the data was made with another"
            )
    elif users and values["null_tokenizer_eod_id"] is None:
        raise UserError(
            f"{flag_name(users[0])} needs the id that ends a document and none is known; "
            "give --null-tokenizer-eod-id N"
        )


def _tp_overlap(plan: Plan, multicast: Callable[[], bool] | None) -> None:
    """TP communication overlap stays only where the hardware can; one note otherwise."""
    if not plan.values["tp_comm_overlap"]:
        return
    reason = None
    if plan.device == "cpu":
        reason = "it needs GPUs"
    elif plan.values["tensor_model_parallel_size"] == 1:
        raise UserError("--tp-comm-overlap has no effect with --tp 1; drop it or raise --tp")
    elif multicast is not None:
        try:
            if not multicast():
                reason = "the device has no multicast support"
        except Exception as problem:
            # Any failure of a capability query means "cannot", whatever its type.
            reason = f"the multicast query failed ({type(problem).__name__}: {problem})"
    elif plan.device in DEVICES and not DEVICES[plan.device][2]:
        reason = f"{plan.device} has no multicast support"
    if reason:
        plan.values["tp_comm_overlap"] = False
        plan.source["tp_comm_overlap"] = "hardware"
        plan.notes.append(f"--tp-comm-overlap is off: {reason}; training goes on without it")


def _linear_cross_entropy(plan: Plan) -> None:
    """Fuse output layer and loss where that is exact; asked for where it is not: an error."""
    asked, values = plan.own.linear_cross_entropy or "auto", plan.values
    if asked == "off":
        return
    reasons = {
        "it needs --calculate-per-token-loss": not values["calculate_per_token_loss"],
        "fp16 scales the loss": values["fp16"],
        "--use-mup scales the logits": values["use_mup"],
        "--defer-embedding-wgrad-compute keeps what it does away with": values[
            "defer_embedding_wgrad_compute"
        ],
        "FSDP holds gradients in a form of its own": (
            values["use_torch_fsdp2"] or values["use_megatron_fsdp"]
        ),
    }
    reason = next((words for words, true in reasons.items() if true), None)
    if reason is None:
        plan.linear_cross_entropy = asked == "on" or plan.device != "cpu"
    elif asked == "on":
        raise UserError(f"--linear-cross-entropy on: {reason}")
    elif plan.device != "cpu":
        plan.notes.append(f"--linear-cross-entropy is off: {reason}")


# --- directories ------------------------------------------------------------------------------


def _directories(plan: Plan, put: Callable[[Mapping[str, Any], str], None]) -> None:
    """Run directory, resume and initial weights."""
    own, values = plan.own, plan.values
    detail = f"{COMMAND_LINE} (--output-dir)"
    has_own = False
    own_load = plan.given("load")
    if own.keep_every is not None and own.keep_last is None:
        raise UserError("--keep-every has no effect without --keep-last; all checkpoints stay")
    if own.save_every_minutes is not None and not own.output_dir:
        raise UserError("--save-every-minutes has no effect without --output-dir")
    if own.keep_last is not None and not own.output_dir:
        raise UserError("--keep-last has no effect without --output-dir; nothing is saved")
    if own.keep_last is not None and plan.given("save_retain_interval"):
        raise UserError("--keep-last and --save-retain-interval both remove checkpoints; give one")
    if own.output_dir:
        resume.check_output(own.output_dir)
        checkpoints = os.path.join(own.output_dir, "checkpoints")
        has_own = resume.latest(checkpoints) is not None
        put({"save": checkpoints}, detail)
        places = {"tensorboard_dir": "tensorboard", "data_cache_path": "cache"}
        if values["record_memory_history"]:
            places["memory_snapshot_path"] = "logs/memory_snapshot.pickle"
        for dest, name in places.items():
            if not plan.given(dest):
                put({dest: os.path.join(own.output_dir, name)}, detail)
        if not own_load:
            put({"load": checkpoints}, detail)
            if has_own and not plan.given("exit_on_missing_checkpoint"):
                put({"exit_on_missing_checkpoint": True}, LAUNCH_DEFAULT)
                plan.notes.append(f"{checkpoints} holds a checkpoint: the run goes on from it")
    elif plan.source["save"] == MEGATRON_DEFAULT:
        plan.notes.append("no --output-dir: nothing will be saved")
        if not plan.given("data_cache_path") and plan.data.training:
            plan.notes[-1] += ", and the data's index is kept beside the data"
    if own_load:
        load = values["load"]
        if not has_checkpoint(load):
            raise UserError(
                f"--load {load}: no checkpoint there ({TRACKER} is missing or empty). Check the "
                "path; to resume, --output-dir alone is enough; for weights only use --init-from"
            )
        if own.output_dir and os.path.realpath(load) != os.path.realpath(checkpoints):
            plan.notes.append(
                f"--load {load} restarts from there at every start, whatever checkpoints "
                f"{own.output_dir} has by then; --init-from (weights alone) goes on from those"
            )
        if not plan.given("exit_on_missing_checkpoint"):
            put({"exit_on_missing_checkpoint": True}, LAUNCH_DEFAULT)
    if own.init_from:
        weights, from_hf, step = initial_weights(own.init_from)
        if not from_hf:
            put({"pretrained_checkpoint": weights}, f"{COMMAND_LINE} (--init-from)")
            if values["load"] is None:
                raise UserError("--init-from needs --output-dir, which the run goes on from later")
            if step is not None and plan.given("ckpt_step") and values["ckpt_step"] != step:
                raise UserError(
                    f"--init-from {own.init_from} is step {step}, --ckpt-step says "
                    f"{values['ckpt_step']}; give one of them"
                )
        if has_own:
            plan.notes.append(
                f"--init-from is not used: {own.output_dir} has a checkpoint and goes on from it"
            )
        elif from_hf:
            if not own_load:
                plan.weights = _hf_weights(plan, weights)
        elif not own_load:
            # Upstream takes this step of whatever it starts from, so a resume must not have it.
            if step is not None:
                put({"ckpt_step": step}, f"{COMMAND_LINE} (--init-from)")
            resume.read(weights, values["ckpt_step"])
    if own.init_from or own_load or has_own:
        from megatron_patch.models.blocks import FROM_SCRATCH

        plan.notes = [note for note in plan.notes if not note.startswith(FROM_SCRATCH)]
    if own_load or has_own:
        plan.start = resume.read(values["load"], values["ckpt_step"])
    _partial_loads(plan, has_own, own_load)


def _partial_loads(plan: Plan, has_own: bool, own_load: bool) -> None:
    """Flags that load a checkpoint in part; on a resume they would act at every start anew."""
    values, out = plan.values, plan.own.output_dir
    weights_only = (
        f"for its weights alone, name it by --init-from with a new --output-dir than {out}"
    )
    if values["finetune"]:
        if has_own:
            raise UserError(
                f"--finetune: {out} has a checkpoint, and every start would begin at step 0 again "
                f"and overwrite it; drop the flag to go on, or, {weights_only}"
            )
        if not own_load:
            raise UserError(
                "--finetune has nothing to start from; name the weights by --init-from DIR, which "
                "needs no --finetune"
            )
        plan.notes.append(
            f"--load {values['load']} --finetune: weights only, step 0. --init-from says the same, "
            "and then the same command also goes on after an interruption"
        )
    if plan.start is None or values["finetune"]:
        return
    if values["no_load_optim"]:
        raise UserError(
            f"--no-load-optim: the run would go on at step {plan.start.iteration} with an empty "
            f"optimizer and a learning rate that warms up again; drop the flag, or, {weights_only}"
        )
    if plan.start.args.get("no_save_optim"):
        raise UserError(
            f"{plan.start.folder} was saved with --no-save-optim, so it cannot be gone on from; "
            f"{weights_only}"
        )
    if values["no_load_rng"]:
        plan.notes.append("--no-load-rng: dropout draws other numbers than without a stop")


def has_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether Megatron would find a checkpoint: its tracker file is there and not empty."""
    try:
        return bool((Path(directory) / TRACKER).read_text(encoding="utf-8").strip())
    except OSError:
        return False


def initial_weights(directory: str) -> tuple[str, bool, int | None]:
    """What ``--init-from`` names.

    Returns:
        The directory, whether it holds Hugging Face files, and the step of it to take where one is
        named: ``iter_0000100``, or a link to one, as ``best`` is; None: what its tracker says.

    Raises:
        UserError: Not a directory, neither a checkpoint nor Hugging Face files in it, or a step
            that its tracker file hides.
    """
    path = Path(directory)
    if not path.is_dir():
        raise UserError(f"--init-from {directory}: no such directory")
    if has_checkpoint(path):
        return directory, False, None
    if has_checkpoint(path / "checkpoints"):
        return str(path / "checkpoints"), False, None
    place = path.resolve() if path.is_symlink() else path
    named = re.fullmatch(r"iter_(\d{7,})|release", place.name)
    if named and has_checkpoint(place.parent):
        tracked = resume.latest(place.parent)
        if tracked == place.name:
            return str(place.parent), False, None if named[1] is None else int(named[1])
        if named[1] is None or tracked == "release":
            raise UserError(
                f"--init-from {directory}: {place.parent / TRACKER} names {tracked}, so Megatron "
                f"loads that; write {'release' if named[1] is None else int(named[1])} into it"
            )
        return str(place.parent), False, int(named[1])
    if (path / "config.json").exists():
        return directory, True, None
    raise UserError(
        f"--init-from {directory}: neither a Megatron checkpoint ({TRACKER} is missing) nor "
        "Hugging Face files (config.json is missing)"
    )


def _hf_weights(plan: Plan, directory: str) -> Source:
    """Headers of the files that a run starts from, compared with its model."""
    from megatron_patch.convert.plan import read_source

    if plan.model is None:
        raise UserError(
            f"--init-from {directory}: Hugging Face files need --hf-model, which says what model "
            "they are of"
        )
    plan.notes.append(f"weights are read from {directory}, without a conversion")
    try:
        return read_source(Path(directory), plan.model)
    except UserError as problem:
        raise UserError(f"--init-from {directory}: {problem}") from None


# --- run length -------------------------------------------------------------------------------

_UNITS = ("train_tokens", "train_iters", "train_samples", "epochs")


def _length(
    plan: Plan,
    found: dict[str, Given],
    need: bool,
    put: Callable[[Mapping[str, Any], str], None],
    data: Epochs | None,
) -> None:
    """Exactly one run length, converted to steps (to samples where the batch size ramps up)."""
    values = plan.values
    asked = [found[u] for u in _UNITS if u in found]
    last = max((g.segment for g in asked), default=0)
    for weaker in [g for g in asked if g.segment < last]:
        values_dest = weaker.option.dest
        if values_dest in values:
            put({values_dest: None}, f"{COMMAND_LINE} (overruled)")
    asked = [g for g in asked if g.segment == last]
    if len(asked) > 1:
        both = " and ".join(f"{g.spelling} {' '.join(g.tokens)}" for g in asked)
        raise UserError(f"{both}: a run has one length; keep one of them")
    if not values["seq_length"]:
        if need or asked:
            raise UserError("--seq-length is missing: tokens a sequence, for example 4096")
        return
    batch = values["global_batch_size"]
    if batch is None:
        batch = values["micro_batch_size"] * plan.data_parallel_size
        put({"global_batch_size": batch}, LAUNCH_DEFAULT)
        plan.notes.append(
            f"--global-batch-size {batch}: micro batch {values['micro_batch_size']} x "
            f"{plan.data_parallel_size} data-parallel ranks"
        )
    if not asked:
        if need:
            raise UserError(
                "the run's length is missing: give one of --train-tokens, --train-iters, "
                "--train-samples, --epochs"
            )
        return
    given = asked[0]
    unit, amount = given.option.dest, given.value
    said = f"{given.spelling} {' '.join(given.tokens)}"
    length = values["seq_length"]
    if plan.own.sft:
        _sft_length(plan, unit, amount, said, put, data)
        if plan.run is not None:
            _go_on(plan, put)
            _cadence(plan, put)
        return
    data_tokens = _epoch_tokens(plan, required=unit == "epochs")
    if unit == "epochs":
        assert data_tokens is not None
        tokens_asked = amount * data_tokens
        if tokens_asked < length:
            raise UserError(f"{said}: {data_tokens} tokens are less than one sequence of {length}")
        samples = math.floor(tokens_asked / length)
    elif unit == "train_tokens":
        samples = math.ceil(amount / length)
    elif unit == "train_samples":
        samples = amount
    else:
        samples = amount * batch
    iters = math.ceil(samples / batch)
    if unit != "train_iters" and iters * batch != samples:
        plan.notes.append(
            f"{said} is {samples / batch:.2f} steps of {batch} sequences: {iters} full steps run"
        )
    ramp = values["rampup_batch_size"] or values["step_batch_size_schedule"]
    if ramp and unit != "train_iters":
        put({"train_samples": samples, "train_iters": None}, f"{COMMAND_LINE} ({said})")
        plan.notes.append("the batch size changes during the run: its length is kept in samples")
    else:
        samples = iters * batch
        if unit != "train_iters":
            put({"train_samples": None, "train_iters": iters}, f"{COMMAND_LINE} ({said})")
    tokens = samples * length
    epochs = tokens / data_tokens if data_tokens else None
    plan.run = RunLength(iters, samples, tokens, epochs, said, data_tokens)
    _warmup(plan, put)
    _go_on(plan, put)
    _restart_schedule(plan, put)
    _cadence(plan, put)


def _cadence(plan: Plan, put: Callable[[Mapping[str, Any], str], None]) -> None:
    """Checkpoints by the clock only, unless the user asked for steps: the last one is saved."""
    assert plan.run is not None
    if plan.source["save_interval"] == MEGATRON_DEFAULT:
        # Upstream divides by it after the last step.
        put({"save_interval": plan.run.iters}, LAUNCH_DEFAULT)


def _go_on(plan: Plan, put: Callable[[Mapping[str, Any], str], None]) -> None:
    """Count a resumed run's length by the sequences that it has read, where the batch changed.

    Upstream keeps the learning rate and the place in the data by sequences and the end of the run
    by steps, so with another batch the two no longer meet.

    Raises:
        UserError: Another sequence length, whose samples are others; or another batch in a ramp.
    """
    values, start, run = plan.values, plan.start, plan.run
    assert run is not None
    if start is None or values["finetune"] or not start.args:
        return
    batch, before = values["global_batch_size"], start.args.get("global_batch_size")
    length, length_before = values["seq_length"], start.args.get("seq_length")
    new = "start a new run from its weights (--init-from with another --output-dir)"
    if length_before not in (None, length):
        raise UserError(
            f"--seq-length {length}, but {start.folder} was trained at {length_before}: its "
            f"{start.samples} sequences are others than those of {length} tokens, and their order "
            f"too. Go on with --seq-length {length_before}, or {new}"
        )
    bound = "the order of packs goes by it" if plan.own.sft else None
    if values["rampup_batch_size"] or values["step_batch_size_schedule"]:
        bound = "it changes during the run"
    if bound:
        if before not in (None, batch):
            raise UserError(
                f"--global-batch-size {batch}, but {start.folder} was trained at {before}, and "
                f"{bound}; go on with --global-batch-size {before}, or {new}"
            )
        return
    if start.samples == start.iteration * batch:
        return
    left = max(0, run.samples - start.samples) // batch
    total = start.iteration + left
    put({"train_iters": total, "train_samples": None}, f"{COMMAND_LINE} ({run.asked})")
    if values["lr_decay_iters"] is None and values["lr_decay_samples"] is None:
        put({"lr_decay_iters": run.iters}, f"by sequences ({run.asked})")
        if start.warmup is not None:
            share = start.warmup / (run.iters * batch)
            put(
                {"lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr_warmup_fraction": share},
                f"{start.folder.name} ({start.warmup} sequences)",
            )
    plan.run = dataclasses.replace(run, iters=total)
    keeps = "" if before in (None, batch) else f" (--global-batch-size {before} would keep it)"
    plan.notes.append(
        f"the batch has changed to {batch} sequences{keeps}: {start.samples} were read in "
        f"{start.iteration} steps, {run.asked} makes {run.samples} in all, so {left} more steps "
        f"run, up to step {total}. The learning rate goes by sequences, its warm-up as it was"
    )


def _restart_schedule(plan: Plan, put: Callable[[Mapping[str, Any], str], None]) -> None:
    """``--restart-schedule-at``: decay to the run's end, counted from a step that has been trained.

    The step stands in the flag, so that the same command goes on after an interruption.

    Raises:
        UserError: No such step, a run whose steps do not tell its sequences, or a flag that an
            earlier start had and this one lacks.
    """
    step, start, run, values = plan.own.restart_schedule_at, plan.start, plan.run, plan.values
    before = start.args.get("restart_schedule_at") if start is not None else None
    if step is None:
        if before is not None and not values["finetune"]:
            raise UserError(
                f"this run's schedule was restarted at step {before}: keep --restart-schedule-at "
                f"{before}, or give another step to restart it there"
            )
        return
    assert run is not None
    flag = f"--restart-schedule-at {step}"
    if start is None or not start.args:
        raise UserError(f"{flag}: there is no checkpoint yet whose schedule could be restarted")
    if not 0 < step <= start.iteration:
        raise UserError(
            f"{flag}: {start.folder} has trained {start.iteration} steps; the schedule restarts at "
            "the step of a checkpoint, the run's last one as a rule"
        )
    if step >= run.iters:
        raise UserError(f"{flag}: the run ends at step {run.iters} ({run.asked}); give it more")
    batch = values["global_batch_size"]
    if values["train_iters"] is None or start.samples != start.iteration * batch:
        raise UserError(
            f"{flag} needs a batch that was the same in all steps, and {start.samples} sequences "
            f"in {start.iteration} steps are not {batch} each; go on with the schedule, or start a "
            "new run from its weights (--init-from with another --output-dir)"
        )
    if values["use_checkpoint_opt_param_scheduler"]:
        raise UserError(f"{flag} and --use-checkpoint-opt-param-scheduler contradict each other")
    left = run.iters - step
    if plan.given("lr_warmup_iters") and values["lr_warmup_iters"] >= left:
        raise UserError(
            f"--warmup-steps {values['lr_warmup_iters']} against {left} steps from step {step} to "
            f"{run.iters}: the learning rate would never reach its peak"
        )
    if values["lr_decay_iters"] is None:
        put({"lr_decay_iters": left}, f"{COMMAND_LINE} ({flag})")
    plan.notes.append(
        f"the schedule is restarted at step {step}: {values['lr_warmup_iters']} steps of warm-up, "
        f"then down to its end at step {run.iters}"
    )


def _sft_length(
    plan: Plan,
    unit: str,
    amount: float,
    said: str,
    put: Callable[[Mapping[str, Any], str], None],
    data: Epochs | None,
) -> None:
    """Length of a fine-tuning run, whose epochs are counted in packs."""
    batch, length = plan.values["global_batch_size"], plan.values["seq_length"]
    if unit not in ("epochs", "train_iters"):
        raise UserError(
            f"{said}: fine-tuning is measured in --num-train-epochs or --train-iters, since an "
            "epoch depends on how samples pack"
        )
    if unit == "epochs":
        if data is None:
            plan.notes.append(f"{said}: the number of steps is known once the data is packed")
            return
        iters = data.steps(float(amount))
        put({"train_samples": None, "train_iters": iters}, f"{COMMAND_LINE} ({said})")
    else:
        iters = int(amount)
    plan.run = RunLength(
        iters,
        iters * batch,
        iters * batch * length,
        data.epochs(iters) if data is not None else None,
        said,
        data.tokens if data is not None else None,
    )
    _warmup(plan, put)


def _warmup(plan: Plan, put: Callable[[Mapping[str, Any], str], None]) -> None:
    """Warm-up in the unit of the run, shorter than the run."""
    assert plan.run is not None
    values, run = plan.values, plan.run
    by_samples = values["train_iters"] is None
    other = values["lr_warmup_fraction"] is not None or values["lr_warmup_samples"]
    if plan.source["lr_warmup_iters"] == MEGATRON_DEFAULT and not other:
        put({"lr_warmup_iters": min(2000, run.iters // 100)}, LAUNCH_DEFAULT)
    warmup = values["lr_warmup_iters"]
    if values["lr_warmup_fraction"] is not None and plan.given("lr_warmup_iters"):
        raise UserError("--lr-warmup-fraction and --warmup-steps are both given; keep one of them")
    if plan.given("lr_warmup_iters") and warmup >= run.iters:
        raise UserError(
            f"--warmup-steps {warmup} against a run of {run.iters} steps ({run.asked}): the "
            "learning rate would never reach its peak; shorten the warm-up or lengthen the run"
        )
    if by_samples and warmup:
        batch = values["global_batch_size"]
        put(
            {"lr_warmup_samples": warmup * batch, "lr_warmup_iters": 0},
            f"{plan.source['lr_warmup_iters']} (in samples)",
        )
    if not by_samples and values["lr_warmup_samples"]:
        batch = values["global_batch_size"]
        steps = math.ceil(values["lr_warmup_samples"] / batch)
        plan.notes.append(f"--lr-warmup-samples {values['lr_warmup_samples']} is {steps} steps")
        put(
            {"lr_warmup_samples": 0, "lr_warmup_iters": steps},
            f"{COMMAND_LINE} (--lr-warmup-samples)",
        )


#: Without ``--epochs`` the epoch figure is only a service: skip indices that take long to read.
_FREE_INDEX_BYTES = 512 * 2**20


def _epoch_tokens(plan: Plan, *, required: bool) -> int | None:
    """Tokens of one pass over the training part of the data; None where it is not here."""
    blend = plan.data.training
    if not blend:
        if required:
            raise UserError("--epochs needs --data-path, whose tokens make an epoch")
        return None
    missing = [p for _, p in blend if not os.path.exists(f"{p}.idx")]
    if missing:
        if required:
            raise UserError(f"--epochs: {missing[0]}.idx is not there, so an epoch has no length")
        return None
    if not required and sum(os.path.getsize(f"{p}.idx") for _, p in blend) > _FREE_INDEX_BYTES:
        return None
    from megatron_patch.data import idxmap

    counts = [idxmap.token_count(prefix) for _, prefix in blend]
    total = sum(counts)
    if plan.data.shares:
        total = math.floor(total * plan.data.shares[0] / sum(plan.data.shares))
    if required and total == 0:
        raise UserError(f"--epochs: {blend[0][1]} holds no tokens")
    weights = [w for w, _ in blend if w is not None]
    if required and len(weights) > 1:
        shares = [
            f"{os.path.basename(p)} {w / sum(weights) * sum(counts) / n:.2f} times"
            for (w, p), n in zip(blend, counts, strict=True)
            if w is not None and n
        ]
        plan.notes.append(
            f"an epoch of the blend is as long as all its data ({human_count(total)} tokens); by "
            f"weight each is then read: {', '.join(shares)}"
        )
    return total


# --- small shared things ----------------------------------------------------------------------


def _model_parallel(values: Mapping[str, Any]) -> int:
    product = (
        values["tensor_model_parallel_size"]
        * values["pipeline_model_parallel_size"]
        * values["context_parallel_size"]
    )
    return max(1, int(product))  # a size of 0 is refused by check, in its own words


def _show(value: Any) -> str:
    if isinstance(value, list) and len(value) > 6 and len({*map(str, value)}) < 4:
        runs: list[tuple[Any, int]] = []
        for item in value:
            if runs and runs[-1][0] == item:
                runs[-1] = (item, runs[-1][1] + 1)
            else:
                runs.append((item, 1))
        if len(runs) <= 8:
            return "+".join(f"[{v}]*{n}" for v, n in runs)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def help_text(program: str, everything: bool = False) -> str:
    """The help of a command that takes these flags; ``everything`` adds Megatron's own."""
    lines = [f"usage: {program} --hf-model DIR --data-path PREFIX --output-dir DIR [flags]", ""]
    for group in dict.fromkeys(flag.group for flag in OWN_FLAGS):
        lines.append(f"{group}:")
        for flag in OWN_FLAGS:
            if flag.group != group:
                continue
            head = f"  {flag.name} {flag.metavar}".rstrip()
            text = flag.help
            text += f" ({'|'.join(flag.choices)})" if flag.choices else ""
            text += f" [{flag.default}]" if flag.default else ""
            text += f"; also {' '.join(flag.aliases)}" if flag.aliases else ""
            first, *more = textwrap.wrap(text, 66, break_on_hyphens=False, break_long_words=False)
            lines.append(column(head, 34) + first)
            lines += [f"{'':<34}{line}" for line in more]
        lines.append("")
    lines.append("One of --train-tokens, --train-iters, --train-samples, --epochs is needed.")
    lines.append("Every Megatron flag passes through and wins; --no-FLAG switches a flag off;")
    lines.append("_ equals -. --help-all lists them with the defaults set here.")
    if everything:
        lines += ["", "Launch defaults (below the model config and your flags):"]
        for row in LAUNCH_DEFAULTS:
            value = "as needed" if callable(row.value) else row.value
            lines.append(f"  {column(row.dest, 38)}{column(str(value), 18)}{row.reason}")
        lines += ["", "On CPU ranks:"]
        for row in CPU_DEFAULTS:
            lines.append(f"  {column(row.dest, 38)}{column(str(row.value), 18)}{row.reason}")
        version = _compat.installed_version("megatron-core") or "not installed; snapshot"
        lines += ["", f"Megatron's flags (megatron-core {version}):"]
        for upstream in _compat.flag_table():
            kind = "" if upstream.action != "store" else f" {upstream.type.upper()}"
            many = {"+": " ...", "*": " ..."}.get(str(upstream.nargs), "")
            choices = f" ({'|'.join(map(str, upstream.choices))})" if upstream.choices else ""
            if len(choices) > 120:
                choices = ""
            lines.append(
                f"  {' '.join(upstream.options)}{kind}{many}{choices} [{upstream.default}]"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(help_text("python -m megatron_patch.pretrain", "--help-all" in sys.argv))
