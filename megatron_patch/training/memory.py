"""Parameters, memory a rank and communication a step, by formula. Nothing is built or imported.

The memory model counts what autograd keeps for a Transformer Engine layer with flash attention:

* weights 2 bytes (bf16), gradients 4 (fp32 buffer, whole), fp32 master and two moments 12 bytes,
  these divided by data x context parallel ranks with the distributed optimizer;
* per token and dense layer, ``8 h + 6 (q + kv) + 6 f`` bytes in bf16: two norm inputs and outputs,
  the QKV projection, rotated queries and keys, the attention output, both halves of the gated MLP
  and its product (h hidden, q and kv the query and key widths, f the MLP's width);
* logits a chunk of tokens at a time with `--linear-cross-entropy`; without it 10 bytes an element
  with the native fused cross-entropy (bf16, fp32 copy, fp32 softmax).

Accuracy, allocated peak against measurements (one H200 or two, TE 2.20, torch 2.11, sequence
4096): Qwen3-1.7B micro batch 4 83 GiB; the same with unfused attention and micro batch 1 56 GiB;
Qwen3-8B DP2 micro batch 1 118 GiB; Qwen3-8B TP2 with sequence parallel, micro batch 2 94 GiB. All
four are met within 3 % (``tests/unit/test_parallel.py``). The terms for MoE, MLA, linear
attention, CP, PP, MTP, FP8 and offloading are derived the same way but have **not** been measured;
take 15 % for them. MoE assumes a load imbalance of :data:`IMBALANCE` between expert ranks.

Legend: every ``_bytes`` is bytes on one rank; a *stage* is a pipeline rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_patch.util import UserError

#: The fullest expert rank against the average one.
IMBALANCE = 1.25

#: CUDA context, cuBLAS and Transformer Engine workspaces of a process.
CONTEXT_BYTES = int(1.0 * 2**30)

#: Buffers of one NCCL communicator.
NCCL_BYTES = int(0.3 * 2**30)

#: Logits that `ops/linear_cross_entropy.py` holds at a time. Each chunk reads and writes the fp32
#: gradient of the weight, so larger ones are faster: 4,096 tokens of a 152K vocabulary in bf16.
LOGITS_CHUNK_BYTES = 5 << 28

#: Share of the activations that the caching allocator loses to fragmentation.
FRAGMENTATION = 0.04


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline rank holds.

    Attributes:
        chunks: Layer numbers of each virtual stage.
        embedding: The input embedding is here.
        loss: Final norm, output layer and loss are here.
        mtp: Multi-token-prediction layers here.
    """

    chunks: tuple[tuple[int, ...], ...]
    embedding: bool
    loss: bool
    mtp: int

    @property
    def layers(self) -> tuple[int, ...]:
        """All decoder layers of the rank."""
        return tuple(layer for chunk in self.chunks for layer in chunk)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest rank of a stage.

    Attributes:
        stage: Pipeline rank that this is about.
        weights: Parameters in their training format.
        gradients: Gradient buffer.
        optimizer: Master weights and moments on the device.
        activations: What autograd keeps, over all micro batches in flight.
        logits: Logits, loss and their gradient.
        working: Tensors alive only inside one layer.
        overhead: CUDA context, communicators, fragmentation.
        host: Bytes that offloading puts into host memory.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    working: int
    overhead: int
    host: int

    @property
    def allocated(self) -> int:
        """The allocator's peak: logits and the backward's working set are not alive together."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + max(self.logits, self.working)
        )

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.allocated + self.overhead


@dataclass(frozen=True, slots=True)
class Sizes:
    """The parallel sizes of a plan's values."""

    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, values: Mapping[str, Any], world: int) -> Sizes:
        """Read them; ETP falls back to TP as upstream does."""
        tp = values["tensor_model_parallel_size"]
        return cls(
            world,
            tp,
            values["pipeline_model_parallel_size"],
            values["context_parallel_size"],
            values["expert_model_parallel_size"],
            values["expert_tensor_parallel_size"] or tp,
        )

    @property
    def dp(self) -> int:
        """Data-parallel size, at least 1."""
        return max(1, self.world // max(1, self.tp * self.pp * self.cp))

    @property
    def edp(self) -> int:
        """Data-parallel size of experts, at least 1."""
        return max(1, self.world // max(1, self.etp * self.ep * self.pp))


# --- layers and stages ------------------------------------------------------------------------


def _pattern(value: Any, layers: int, name: str, one_in: bool) -> list[bool]:
    """A layer pattern as booleans. ``one_in``: N marks every N-th from the first; else all but."""
    if value is None:
        return [False] * layers
    if isinstance(value, int):
        if value < 1:
            raise UserError(f"{name} {value}: at least 1 is needed")
        return [i % value == 0 if one_in else (i + 1) % value != 0 for i in range(layers)]
    if len(value) != layers:
        raise UserError(f"{name} lists {len(value)} layers, but the model has {layers}")
    return [bool(v) for v in value]


def moe_layers(values: Mapping[str, Any]) -> list[bool]:
    """For every decoder layer, whether its MLP is a mixture of experts."""
    layers = values["num_layers"]
    if not values["num_experts"]:
        return [False] * layers
    return _pattern(values["moe_layer_freq"], layers, "--moe-layer-freq", True)


def linear_layers(values: Mapping[str, Any]) -> list[bool]:
    """For every decoder layer, whether its attention is linear (Gated DeltaNet)."""
    freq, layers = values["linear_attention_freq"], values["num_layers"]
    if isinstance(freq, list) and len(freq) == layers + (values["mtp_num_layers"] or 0):
        freq = freq[:layers]  # the rest is that of multi-token prediction
    return _pattern(freq, layers, "--linear-attention-freq", False)


def virtual_stages(values: Mapping[str, Any]) -> int:
    """Virtual pipeline stages a rank."""
    pp: int = values["pipeline_model_parallel_size"]
    if values["pipeline_model_parallel_layout"]:
        return max(1, len(_layout_stages(values["pipeline_model_parallel_layout"])) // pp)
    if values["num_virtual_stages_per_pipeline_rank"]:
        return int(values["num_virtual_stages_per_pipeline_rank"])
    per_virtual: int | None = values["num_layers_per_virtual_pipeline_stage"]
    if per_virtual:
        return max(1, _slots(values) // pp // per_virtual)
    return 1


def _slots(values: Mapping[str, Any]) -> int:
    """Layers, counting embedding and loss where the split is told to."""
    return int(
        values["num_layers"]
        + bool(values["account_for_embedding_in_pipeline_split"])
        + bool(values["account_for_loss_in_pipeline_split"])
    )


def _layout_stages(layout: str) -> list[str]:
    """``"Ett|(tt|)*3mL"`` -> one string of layer letters a stage (E, t, m, L)."""
    text = layout.replace(",", "").replace(" ", "")
    while "(" in text:
        start = text.rindex("(")
        end = text.find(")*", start)
        digits = ""
        for letter in text[end + 2 :] if end >= 0 else "":
            if not letter.isdigit():
                break
            digits += letter
        if not digits:
            raise UserError(f"--pipeline-model-parallel-layout {layout}: '(' without ')*N'")
        body = text[start + 1 : end] * int(digits)
        text = text[:start] + body + text[end + 2 + len(digits) :]
    out = ""
    position = 0
    while position < len(text):
        letter = text[position]
        position += 1
        if position < len(text) and text[position] == "*":
            digits = ""
            position += 1
            while position < len(text) and text[position].isdigit():
                digits += text[position]
                position += 1
            if not digits:
                raise UserError(f"--pipeline-model-parallel-layout {layout}: '*' without a number")
            letter *= int(digits)
        out += letter
    wrong = set(out) - set("EtmL|")
    if wrong:
        raise UserError(
            f"--pipeline-model-parallel-layout {layout}: {sorted(wrong)} is not one of E t m L |"
        )
    return out.split("|")


def stages(values: Mapping[str, Any]) -> list[Stage]:
    """The pipeline split, as upstream makes it.

    Returns:
        One entry a pipeline rank.

    Raises:
        UserError: The layers do not divide; with both numbers and a remedy.
    """
    pp, layers = values["pipeline_model_parallel_size"], values["num_layers"]
    vpp = virtual_stages(values)
    mtp = values["mtp_num_layers"] or 0
    layout = values["pipeline_model_parallel_layout"]
    first = values["decoder_first_pipeline_num_layers"]
    last = values["decoder_last_pipeline_num_layers"]
    if layout:
        return _explicit(layout, pp, layers, mtp)
    if pp == 1 and vpp == 1:
        return [Stage((tuple(range(layers)),), True, True, mtp)]
    if first is not None or last is not None:
        counts = _uneven(layers, pp, vpp, first, last)
    else:
        counts = _even(values, layers, pp, vpp)
    chunks: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    position = 0
    for turn in range(vpp):
        for rank in range(pp):
            size = counts[rank][turn]
            chunks[rank].append(tuple(range(position, position + size)))
            position += size
    return [
        Stage(tuple(chunks[r]), r == 0, r == pp - 1, mtp if r == pp - 1 else 0) for r in range(pp)
    ]


def _uneven(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> list[list[int]]:
    """Layers of each chunk where the first or last stage has a size of its own."""
    fixed = {rank: n for rank, n in ((0, first), (pp - 1, last)) if n is not None}
    rest = layers - sum(fixed.values())
    middle = pp - len(fixed)
    named = " ".join(
        f"--decoder-{'first' if rank == 0 else 'last'}-pipeline-num-layers {n}"
        for rank, n in fixed.items()
    )
    if rest < 0 or (middle == 0 and rest != 0) or (middle and rest % middle):
        raise UserError(
            f"{named} leaves {rest} of {layers} layers for {middle} other stages, which does not "
            f"divide; {_nearest_split(layers, pp)}"
        )
    sizes = [fixed.get(rank, rest // middle if middle else 0) for rank in range(pp)]
    for rank, size in enumerate(sizes):
        if size % vpp:
            raise UserError(
                f"stage {rank} has {size} layers, which {vpp} virtual stages (--vpp {vpp}) do not "
                f"divide; use --vpp {math.gcd(*sizes)}"
            )
    return [[size // vpp] * vpp for size in sizes]


def _even(values: Mapping[str, Any], layers: int, pp: int, vpp: int) -> list[list[int]]:
    """Layers of each chunk of an even split; embedding and loss may take a layer's place."""
    embedding = bool(values["account_for_embedding_in_pipeline_split"])
    loss = bool(values["account_for_loss_in_pipeline_split"])
    slots = layers + embedding + loss
    counted = f" ({slots} with embedding and loss)" if slots != layers else ""
    if slots % pp:
        raise UserError(
            f"{layers} layers{counted} do not divide by --pp {pp}; {_nearest_split(layers, pp)}"
        )
    per_virtual = values["num_layers_per_virtual_pipeline_stage"]
    if per_virtual and (slots // pp) % per_virtual:
        raise UserError(
            f"{slots // pp} layers a stage do not divide by "
            f"--num-layers-per-virtual-pipeline-stage {per_virtual}; use "
            f"{math.gcd(slots // pp, per_virtual)}"
        )
    if (slots // pp) % vpp:
        divisors = [d for d in range(1, slots // pp + 1) if (slots // pp) % d == 0]
        raise UserError(
            f"{slots // pp} layers a stage do not divide by --vpp {vpp}; use one of {divisors}"
        )
    counts = [[slots // pp // vpp] * vpp for _ in range(pp)]
    counts[0][0] -= embedding
    counts[-1][-1] -= loss
    return counts


def _nearest_split(layers: int, pp: int) -> str:
    """A remedy for layers that do not divide."""
    divisors = [d for d in range(1, min(layers, 2 * pp) + 1) if layers % d == 0]
    middle = layers // pp
    ends = layers - middle * (pp - 2)
    first = ends // 2
    uneven = (
        f", or --decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers "
        f"{ends - first}"
        if pp > 1 and middle
        else ""
    )
    return f"use --pp one of {divisors}{uneven}"


def _explicit(layout: str, pp: int, layers: int, mtp: int) -> list[Stage]:
    """The stages of ``--pipeline-model-parallel-layout``."""
    parts = _layout_stages(layout)
    name = f"--pipeline-model-parallel-layout {layout}"
    if len(parts) % pp:
        raise UserError(f"{name} has {len(parts)} stages, which --pp {pp} does not divide")
    letters = "".join(parts)
    if letters.count("t") != layers:
        raise UserError(f"{name} has {letters.count('t')} layers, but the model has {layers}")
    if letters.count("m") != mtp:
        raise UserError(f"{name} has {letters.count('m')} MTP layers, but the model has {mtp}")
    if letters.count("E") != 1 or letters[0] != "E":
        raise UserError(f"{name} must start with its only E (embedding)")
    if letters.count("L") != 1 or letters[-1] != "L":
        raise UserError(f"{name} must end with its only L (loss)")
    position = 0
    chunks: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    held = ["" for _ in range(pp)]
    for index, part in enumerate(parts):
        size = part.count("t")
        chunks[index % pp].append(tuple(range(position, position + size)))
        held[index % pp] += part
        position += size
    return [
        Stage(tuple(chunks[r]), "E" in held[r], "L" in held[r], held[r].count("m"))
        for r in range(pp)
    ]


# --- parameters -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerParams:
    """Parameters of one layer of the whole model.

    Attributes:
        split: Divided over TP.
        whole: On every TP rank (norms, routers, low-rank projections).
        experts: Routed experts, divided over EP and ETP.
        active: Of ``experts``, those that a token uses.
    """

    split: int
    whole: int
    experts: int
    active: int


def layer_params(values: Mapping[str, Any], moe: bool, linear: bool) -> LayerParams:
    """Parameters of a decoder layer."""
    h = values["hidden_size"]
    norm = (1 if values["normalization"] == "RMSNorm" else 2) * h
    bias = bool(values["add_bias_linear"])
    split, whole = 0, 2 * norm
    heads, channels = values["num_attention_heads"], values["kv_channels"] or 0
    if linear:
        key, value, narrow = _gdn_widths(values)
        split += h * (2 * key + 2 * value + 2 * narrow) + value * h
        split += values["linear_conv_kernel_dim"] * (2 * key + value) + 2 * narrow
        whole += values["linear_value_head_dim"]
    elif values["multi_latent_attention"]:
        nope, pe, out = (values[k] for k in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        q_rank, kv_rank = values["q_lora_rank"], values["kv_lora_rank"]
        if q_rank:
            whole += h * q_rank + q_rank
            split += q_rank * heads * (nope + pe)
        else:
            split += h * heads * (nope + pe)
        whole += h * (kv_rank + pe) + kv_rank
        split += kv_rank * heads * (nope + out) + heads * out * h
    else:
        q, kv = query_widths(values)
        gate = q if values["attention_output_gate"] else 0
        split += h * (q + gate + 2 * kv) + q * h
        if bias or values["add_qkv_bias"]:
            split += q + gate + 2 * kv
        whole += h if bias else 0
        split += heads if values["softmax_type"] == "learnable" else 0
        if values["qk_layernorm"]:
            whole += 2 * channels
    halves = 2 if _gated(values) else 1
    experts = active = 0
    if moe:
        width = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"]
        inner = values["moe_latent_size"] or h
        one = (halves + 1) * inner * width + (halves * width + inner if bias else 0)
        experts, active = one * values["num_experts"], one * values["moe_router_topk"]
        whole += (h + 1 if bias else h) * values["num_experts"]
        if values["moe_router_enable_expert_bias"]:
            whole += values["num_experts"]
        if values["moe_latent_size"]:
            whole += 2 * h * inner
        shared = values["moe_shared_expert_intermediate_size"] or 0
        split += (halves + 1) * h * shared
        if values["moe_shared_expert_gate"]:
            whole += h
    else:
        width = values["ffn_hidden_size"]
        split += (halves + 1) * h * width
        if bias:
            split += halves * width
            whole += h
    return LayerParams(split, whole, experts, active)


def query_widths(values: Mapping[str, Any]) -> tuple[int, int]:
    """Width of all query heads and of all key heads."""
    heads, channels = values["num_attention_heads"], values["kv_channels"]
    groups = values["num_query_groups"] if values["group_query_attention"] else heads
    return heads * channels, groups * channels


def _gdn_widths(values: Mapping[str, Any]) -> tuple[int, int, int]:
    return (
        values["linear_num_key_heads"] * values["linear_key_head_dim"],
        values["linear_num_value_heads"] * values["linear_value_head_dim"],
        values["linear_num_value_heads"],
    )


def _gated(values: Mapping[str, Any]) -> bool:
    return bool(values["swiglu"] or values["quick_geglu"])


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of the whole model: in all, and those that one token uses."""

    total: int
    active: int


def parameters(values: Mapping[str, Any]) -> Parameters:
    """Count the model's parameters, MTP included, tied embeddings once."""
    total = active = 0
    kinds = list(zip(moe_layers(values), linear_layers(values), strict=True))
    kinds += [kinds[-1]] * (values["mtp_num_layers"] or 0)
    for moe, linear in kinds:
        one = layer_params(values, moe, linear)
        total += one.split + one.whole + one.experts
        active += one.split + one.whole + one.active
    h = values["hidden_size"]
    table = values["padded_vocab_size"] * h
    ends = table * (2 if values["untie_embeddings_and_output_weights"] else 1)
    norm = (1 if values["normalization"] == "RMSNorm" else 2) * h
    ends += norm + (values["mtp_num_layers"] or 0) * (2 * h * h + 3 * norm)
    return Parameters(total + ends, active + ends)


def _stage_params(values: Mapping[str, Any], sizes: Sizes, stage: Stage) -> tuple[int, int]:
    """Parameters on a rank of the stage: dense ones, expert ones."""
    moe, linear = moe_layers(values), linear_layers(values)
    dense = experts = 0.0
    held = [(moe[i], linear[i]) for i in stage.layers] + [(moe[-1], linear[-1])] * stage.mtp
    for kind in held:
        one = layer_params(values, *kind)
        dense += one.split / sizes.tp + one.whole
        experts += one.experts / (sizes.ep * sizes.etp)
    h = values["hidden_size"]
    table = values["padded_vocab_size"] * h / sizes.tp
    untied = values["untie_embeddings_and_output_weights"]
    if stage.embedding or stage.mtp:
        dense += table
    if stage.loss and (untied or not (stage.embedding or stage.mtp)):
        dense += table
    if stage.loss:
        dense += h
    dense += stage.mtp * (2 * h * h / sizes.tp + 3 * h)
    return math.ceil(dense), math.ceil(experts)


def rank_parameters(values: Mapping[str, Any], world: int) -> list[int]:
    """Parameters on a rank of every pipeline stage."""
    sizes = Sizes.of(values, world)
    return [sum(_stage_params(values, sizes, stage)) for stage in stages(values)]


# --- activations ------------------------------------------------------------------------------


def layer_activations(
    values: Mapping[str, Any], sizes: Sizes, moe: bool, linear: bool
) -> dict[str, float]:
    """Bytes that one layer keeps for one micro batch, by component.

    The keys ``norm``, ``attention``, ``mlp``, ``act``, ``experts`` and so on are what selective
    recomputation drops.
    """
    width = 4 if not (values["bf16"] or values["fp16"]) else 2
    fp8 = values["fp8"] is not None
    h, s, batch = values["hidden_size"], values["seq_length"], values["micro_batch_size"]
    tokens = s * batch / sizes.cp
    tp = sizes.tp
    spread = tp if values["sequence_parallel"] else 1
    linear_width = width - 1 if fp8 else width  # an FP8 linear keeps its input in one byte
    kept: dict[str, float] = {
        "residual": 2 * width * h * tokens / spread,
        "norm": 2 * linear_width * h * tokens / spread,
    }
    heads = values["num_attention_heads"]
    if linear:
        key, value, _ = _gdn_widths(values)
        # projection, convolution output, normalised keys, output, gate
        kept["attention"] = width * tokens * (2 * (2 * key + value) + 2 * key + 4 * value) / tp
    elif values["multi_latent_attention"]:
        nope, pe, out = (values[k] for k in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        low = 2 * (values["q_lora_rank"] or 0) + 2 * values["kv_lora_rank"] + pe
        kept["low_rank"] = width * tokens * low / spread
        kept["mla_up"] = width * tokens * heads * (2 * nope + pe + out) / tp
        kept["attention"] = width * tokens * heads * (2 * (nope + pe) + 2 * out) / tp
    else:
        q, kv = query_widths(values)
        gate = 2 * q if values["attention_output_gate"] else 0
        kept["attention"] = width * tokens * (3 * q + 3 * kv + gate) / tp
        if fp8:
            kept["attention"] += tokens * q / tp  # the projection's own copy
    kept["lse"] = 4 * heads * tokens / tp
    if _unfused(values) and not linear:
        kept["scores"] = width * heads * s * (s / sizes.cp) * batch / tp
    halves = 2 if _gated(values) else 1
    if moe:
        routed = tokens / spread * values["moe_router_topk"] * sizes.etp
        routed *= IMBALANCE if sizes.ep > 1 else 1.0
        expert = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"]
        expert /= sizes.etp
        inner = values["moe_latent_size"] or h
        kept["router"] = 2 * 4 * values["num_experts"] * tokens / spread
        kept["dispatch"] = linear_width * inner * routed
        kept["experts"] = width * halves * expert * routed
        kept["moe_act"] = linear_width * expert * routed
        shared = values["moe_shared_expert_intermediate_size"] or 0
        kept["shared"] = (width * halves + linear_width) * shared * tokens / tp
    else:
        f = values["ffn_hidden_size"]
        kept["mlp"] = (width * halves + linear_width) * f * tokens / tp
    if values["attention_dropout"] or values["hidden_dropout"]:
        kept["dropout"] = 2 * h * tokens / spread
    return kept


def _unfused(values: Mapping[str, Any]) -> bool:
    return values["transformer_impl"] == "local" or values["attention_backend"] in (
        "unfused",
        "local",
    )


#: ``--recompute-modules`` name -> components of :func:`layer_activations` that it drops.
_RECOMPUTED: dict[str, tuple[str, ...]] = {
    "core_attn": ("scores", "lse"),
    "layernorm": ("norm",),
    "mla_up_proj": ("mla_up",),
    "mlp": ("mlp",),
    "moe": ("router", "dispatch", "experts", "moe_act", "shared"),
    "moe_act": ("moe_act",),
    "shared_experts": ("shared",),
}


def _kept_bytes(values: Mapping[str, Any], sizes: Sizes, kind: tuple[bool, bool]) -> float:
    """What a layer keeps after recomputation."""
    parts = layer_activations(values, sizes, *kind)
    granularity = values["recompute_granularity"]
    if granularity == "selective" or values["recompute_activations"]:
        for module in values["recompute_modules"] or ["core_attn"]:
            for part in _RECOMPUTED.get(module, ()):
                parts.pop(part, None)
    return sum(parts.values())


def in_flight(sizes: Sizes, vpp: int, stage: int, micro_batches: int) -> float:
    """Micro batches of the whole stage that are kept at once.

    1F1B keeps ``pp - stage``. The interleaved schedule keeps ``2 (pp - stage - 1) + (vpp - 1) pp +
    1`` chunks of 1/vpp of the stage. Source: ``megatron/core/pipeline_parallel/schedules.py``.
    """
    if vpp == 1:
        return min(micro_batches, sizes.pp - stage)
    chunks = 2 * (sizes.pp - stage - 1) + (vpp - 1) * sizes.pp + 1
    return min(micro_batches * vpp, chunks) / vpp


def _stage_activations(
    values: Mapping[str, Any], sizes: Sizes, stage: Stage, flight: float
) -> tuple[float, float, float]:
    """Kept bytes, working bytes and offloaded bytes of a stage."""
    moe, linear = moe_layers(values), linear_layers(values)
    kinds = [(moe[i], linear[i]) for i in stage.layers]
    s, batch, h = values["seq_length"], values["micro_batch_size"], values["hidden_size"]
    tokens = s * batch / sizes.cp
    spread = sizes.tp if values["sequence_parallel"] else 1
    width = 4 if not (values["bf16"] or values["fp16"]) else 2
    entry = width * h * tokens / spread
    per_layer = [_kept_bytes(values, sizes, kind) for kind in kinds]
    largest = max((sum(layer_activations(values, sizes, *k).values()) for k in kinds), default=0.0)
    kept = sum(per_layer)
    working = largest / 2 + width * h * tokens  # gradients inside a layer, one gathered input
    if values["recompute_granularity"] == "full":
        count = values["recompute_num_layers"] or 1
        if values["recompute_method"] == "block":
            done = min(count, len(kinds))
            kept = done * entry + sum(per_layer[done:])
            working += largest
        else:
            kept = math.ceil(len(kinds) / count) * entry
            working += count * largest
    offloaded = 0.0
    moved = values["cpu_offloading_num_layers"]
    if moved and kinds:
        offloaded = kept * min(moved, len(kinds)) / len(kinds) * flight
        kept = kept * max(1, len(kinds) - moved) / len(kinds)
        working += 2 * largest  # one layer on its way out and one on its way in
    if stage.embedding:
        kept += entry
    if sizes.cp > 1 and not all(linear[i] for i in stage.layers):
        _, kv = query_widths(values) if not values["multi_latent_attention"] else (0, 0)
        if values["multi_latent_attention"]:
            kv = values["num_attention_heads"] * (
                values["qk_head_dim"] + values["qk_pos_emb_head_dim"]
            )
        gathered = "allgather" in values["cp_comm_type"]
        working += width * 2 * kv / sizes.tp * tokens * (sizes.cp if gathered else 4)
    if values["create_attention_mask_in_dataloader"]:
        working += 4.0 * s * s * batch
    # Inputs of both norms and of the projection of their results, then a layer; or the two inputs.
    further = 4 * entry + _kept_bytes(values, sizes, (moe[-1], linear[-1]))
    if values["recompute_granularity"] == "full":
        further = 2 * entry
    return (kept + stage.mtp * further) * flight, working, offloaded


# --- the whole rank ---------------------------------------------------------------------------


def memory(
    values: Mapping[str, Any], world: int, device: str, *, linear_cross_entropy: bool = False
) -> list[Memory]:
    """Memory of every pipeline stage's fullest rank.

    Args:
        values: A plan's values.
        world: Ranks in all.
        device: ``cpu`` leaves out what belongs to CUDA.
        linear_cross_entropy: the logits of a chunk of tokens at a time.

    Raises:
        UserError: The pipeline split is impossible.
    """
    sizes = Sizes.of(values, world)
    vpp = virtual_stages(values)
    batch = values["micro_batch_size"]
    steps = max(1, values["global_batch_size"] // (batch * sizes.dp))
    mixed = bool(values["bf16"] or values["fp16"])
    out = []
    for index, stage in enumerate(stages(values)):
        dense, experts = _stage_params(values, sizes, stage)
        count = dense + experts
        weight = 2 if mixed else 4
        weights: float = count * weight
        if values["fp8"] and device != "cpu":
            weights += 2 * count * (0 if values["fp8_param_gather"] else 1)
        gradients = count * (4 if not mixed or not _bf16_grads(values) else 2)
        state = _state_bytes(values, mixed)
        if values["use_distributed_optimizer"]:
            optimizer = state * (dense / (sizes.dp * sizes.cp) + experts / sizes.edp)
        else:
            optimizer = float(state * count)
        host = 0.0
        if values["optimizer_cpu_offload"]:
            moved = optimizer * values["optimizer_offload_fraction"]
            optimizer -= moved
            # Beside the states a float32 copy of the gradients, made at the first step.
            host = moved * (state + 4) / state
        flight = in_flight(sizes, vpp, index, steps)
        kept, working, offloaded = _stage_activations(values, sizes, stage, flight)
        logits = 0.0
        if stage.loss:
            element = 10 if values["cross_entropy_loss_fusion"] else 14
            rows = values["seq_length"] * batch / sizes.cp
            columns = values["padded_vocab_size"] / sizes.tp
            whole = element * rows * columns
            logits = whole * (1 + stage.mtp)
            if linear_cross_entropy:
                logits = min(whole, LOGITS_CHUNK_BYTES) + whole * stage.mtp
        overhead = _overhead(sizes, kept, device)
        out.append(
            Memory(
                index,
                int(weights),
                int(gradients),
                int(optimizer),
                int(kept),
                int(logits),
                int(working),
                int(overhead),
                int(host + offloaded),
            )
        )
    return out


def _bf16_grads(values: Mapping[str, Any]) -> bool:
    return bool(values["grad_reduce_in_bf16"] or values["main_grads_dtype"] == "bf16")


def _state_bytes(values: Mapping[str, Any], mixed: bool) -> int:
    """Bytes of master weight and moments a parameter."""
    size = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
    if values["optimizer"] == "sgd":
        return (4 if mixed else 0) + (4 if values["sgd_momentum"] else 0)
    if not values["use_precision_aware_optimizer"]:
        return (4 if mixed else 0) + 8
    master = size[values["main_params_dtype"]] if mixed else 0
    return master + size[values["exp_avg_dtype"]] + size[values["exp_avg_sq_dtype"]]


def checkpoint_bytes(values: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint of all weights and, where it is saved, of the optimizer's states."""
    mixed = bool(values["bf16"] or values["fp16"])
    states = 0 if values["no_save_optim"] else _state_bytes(values, mixed)
    if states and not mixed and values["use_distributed_optimizer"]:
        states += 4  # it saves a master of its own where the weights are fp32, too
    return parameters(values).total * ((2 if mixed else 4) + states)


def _overhead(sizes: Sizes, kept: float, device: str) -> float:
    if device == "cpu":
        return 0.7 * 2**30
    groups = sum(n > 1 for n in (sizes.tp, sizes.pp, sizes.cp, sizes.dp, sizes.ep))
    return CONTEXT_BYTES + groups * NCCL_BYTES + FRAGMENTATION * kept


# --- communication ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in one step, by group.

    With T tokens a rank and micro batch, h hidden, m micro batches, L layers a rank, 2 bytes an
    element:

    * tensor: ``10 m L T h 2 (tp-1)/tp`` (with sequence parallel: four gathers or scatters forward,
      six backward; MoE layers only for their attention half);
    * context: ``3 m L T 2 kv 2 (cp-1)/tp`` (keys and values once forward, with gradients back);
    * pipeline: ``2 m v T h 2 / tp``;
    * expert: ``4 m L_moe T/tp k h 2 (ep-1)/ep``;
    * data: ``6 N (dp-1)/dp`` with N parameters a rank (fp32 gradients out, bf16 weights back).
    """

    tensor: float
    context: float
    pipeline: float
    expert: float
    data: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.tensor + self.context + self.pipeline + self.expert + self.data


def traffic(values: Mapping[str, Any], world: int) -> Traffic:
    """Communication of the stage that sends most; see :class:`Traffic` for the formulas."""
    sizes = Sizes.of(values, world)
    vpp = virtual_stages(values)
    steps = max(1, values["global_batch_size"] // (values["micro_batch_size"] * sizes.dp))
    tokens = values["seq_length"] * values["micro_batch_size"] / sizes.cp
    h = values["hidden_size"]
    moe, linear = moe_layers(values), linear_layers(values)
    ops = 14 if values["recompute_granularity"] == "full" else 10
    worst: Traffic | None = None
    for stage in stages(values):
        routed = sum(moe[i] for i in stage.layers)
        layers = len(stage.layers)
        halves = 2 * layers - routed
        tensor = ops / 2 * halves * steps * tokens * h * 2 * (sizes.tp - 1) / sizes.tp
        if values["multi_latent_attention"]:
            pe = values["qk_head_dim"] + values["qk_pos_emb_head_dim"] + values["v_head_dim"]
            kv2 = values["num_attention_heads"] * pe
        else:
            kv2 = 2 * query_widths(values)[1]
        soft = sum(not linear[i] for i in stage.layers)
        context = 3 * steps * soft * tokens * kv2 * 2 * (sizes.cp - 1) / sizes.tp
        pipeline = 2 * steps * vpp * tokens * h * 2 / sizes.tp if sizes.pp > 1 else 0.0
        topk = values["moe_router_topk"] or 0
        hops = 4 if ops == 10 else 6
        expert = hops * steps * routed * tokens / sizes.tp * topk * h * 2
        expert *= (sizes.ep - 1) / sizes.ep + (sizes.etp - 1) / sizes.etp
        dense, experts = _stage_params(values, sizes, stage)
        replicas = sizes.dp * sizes.cp
        data = 6 * dense * (replicas - 1) / replicas + 6 * experts * (sizes.edp - 1) / sizes.edp
        one = Traffic(tensor, context, pipeline, expert, data)
        if worst is None or one.total > worst.total:
            worst = one
    assert worst is not None
    return worst


def attention_flops(values: Mapping[str, Any]) -> float:
    """Operations of softmax attention in one step over all ranks, forward and backward.

    ``6 L s q`` a token (causal: half of the square).
    """
    s = values["seq_length"]
    if values["multi_latent_attention"]:
        per_head = values["qk_head_dim"] + values["qk_pos_emb_head_dim"] + values["v_head_dim"]
        width = values["num_attention_heads"] * per_head / 2
    else:
        width = query_widths(values)[0]
    soft = sum(not linear for linear in linear_layers(values))
    return float(6 * soft * s * width * s * values["global_batch_size"])


def step_flops(values: Mapping[str, Any]) -> float:
    """Operations of one step over all ranks: ``6 N_active`` a token, and attention."""
    active = parameters(values).active
    if values["untie_embeddings_and_output_weights"]:
        # looking up a row is no matrix product
        active -= values["padded_vocab_size"] * values["hidden_size"]
    tokens = values["seq_length"] * values["global_batch_size"]
    return float(6 * active * tokens + attention_flops(values))
