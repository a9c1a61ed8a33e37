"""Parts that families share: config readers, layer plans, and the keys that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_patch.convert.rules import (
    HEAD,
    Alternating,
    DeltaHeads,
    GatedQKV,
    GatedUp,
    GroupedQKV,
    Joined,
    Operation,
    PadVocab,
    Rename,
    Rule,
    Stack,
    embedding,
)
from megatron_patch.models.family import (
    VOCAB_MULTIPLE,
    LayerSpec,
    ModelSpec,
    Only,
    Reader,
    padded_vocab_size,
)
from megatron_patch.util import Range, UserError

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

_POSITIVE = Range(0, above=True)
#: Sizes that something is made for each of; others end at 32 bits.
_MOST = (("num_hidden_layers", 10_000), ("num_experts", 1 << 17), ("n_routed_experts", 1 << 17))

#: Keys that record how a file was made or how text is generated.
INERT: tuple[tuple[str, str], ...] = (
    ("_attn_implementation", "which attention kernel transformers picks"),
    ("_attn_implementation_autoset", "which attention kernel transformers picks"),
    ("_attn_implementation_internal", "which attention kernel transformers picks"),
    ("_commit_hash", "bookkeeping"),
    ("_flash_attn_2_enabled", "which attention kernel transformers picks"),
    ("_model_name_or_path", "bookkeeping, written for GGUF files"),
    ("_name_or_path", "bookkeeping"),
    ("attn_implementation", "which attention kernel transformers picks"),
    ("bos_token_id", "the tokenizer's"),
    ("chunk_size_feed_forward", "no decoder of these families reads it"),
    ("do_sample", "generation"),
    ("dtype", "stored precision; training's is --precision"),
    ("eos_token_id", "the tokenizer's"),
    ("id2label", "classification heads"),
    ("label2id", "classification heads"),
    ("max_length", "generation"),
    ("max_new_tokens", "generation"),
    ("max_sequence_length", "written by early Llama converters, read by nothing"),
    ("output_attentions", "what transformers returns"),
    ("output_hidden_states", "what transformers returns"),
    ("pad_token_id", "padding carries no loss here, so its embedding row learns nothing anyway"),
    ("problem_type", "classification heads"),
    ("repetition_penalty", "generation"),
    ("return_dict", "what transformers returns"),
    ("task_specific_params", "generation"),
    ("temperature", "generation"),
    ("tokenizer_class", "the tokenizer's"),
    ("top_k", "generation"),
    ("top_p", "generation"),
    ("torch_dtype", "stored precision; training's is --precision"),
    ("transformers.js_config", "deployment in a browser"),
    ("transformers_version", "bookkeeping"),
    ("unk_token_id", "the tokenizer's"),
    ("use_cache", "generation"),
)

#: Features that no family here has; a config that turns one on is another network.
ONLY: tuple[Only, ...] = (
    Only("hidden_act", ("silu", "swish"), "the gated MLP is SwiGLU."),
    Only("auto_map", (None,), "the model brings its own code, which may be another network."),
    Only("is_encoder_decoder", (False,), "these are decoders."),
    Only("add_cross_attention", (False,), "these are decoders."),
    Only("use_mrope", (False,), "multimodal rope belongs to vision-language models."),
    Only("dual_chunk_attention_config", (None,), "delete it to train with full attention."),
)

#: What only a sliding window would read.
SLIDING_INERT: tuple[tuple[str, str], ...] = (
    ("sliding_window", "without use_sliding_window no layer has a window"),
    ("max_window_layers", "without use_sliding_window no layer has a window"),
)
#: Of every mixture of experts.
MOE_INERT: tuple[tuple[str, str], ...] = (
    ("output_router_logits", "what transformers returns; the balancing loss has its own key"),
)
SLIDING_ONLY = Only(
    "use_sliding_window",
    (False,),
    "transformers' code of this model has no windows; set it to false.",
)
#: What ``layer_types`` calls attention with a sliding window, and without.
WINDOWED = ("sliding_attention", "full_attention")


#: Accepted values of the keys of a ``quantization_config``; the first one is that of an absent key.
Format = tuple[tuple[str, tuple[Any, ...]], ...]

#: FP8 weights with one scale for every block, as DeepSeek and Qwen publish them.
FP8_BLOCKS: Mapping[str, Format] = MappingProxyType(
    {
        "fp8": (
            ("quant_method", ("fp8",)),
            ("weight_block_size", ([128, 128],)),
            ("fmt", ("e4m3", None)),
            ("activation_scheme", ("dynamic", None)),
            ("scale_fmt", ("ue8m0", None)),  # powers of two, stored as float32
            ("modules_to_not_convert", ()),  # which tensors are quantised is seen from the files
        )
    }
)
#: MXFP4 experts, as OpenAI publishes them.
MXFP4: Mapping[str, Format] = MappingProxyType(
    {"mxfp4": (("quant_method", ("mxfp4",)), ("modules_to_not_convert", ()))}
)
#: How the formats are called in messages.
_FORMAT_NAMES = MappingProxyType({"fp8": "FP8 (e4m3) in blocks of 128 x 128", "mxfp4": "MXFP4"})


#: How the note on random weights begins, which has no place in a run that starts from others.
FROM_SCRATCH = "initialisation from scratch"


def stored_weights(hf: HFConfig, notes: list[str], formats: Mapping[str, Format]) -> None:
    """Accepts weights stored in one of the formats, with scales, and no other."""
    found = hf.typed("quantization_config", None, dict)
    if found is None:
        return
    method = found.get("quant_method")
    known = formats.get(method, ()) if isinstance(method, str) else ()
    rest = set(found) - {key for key, _ in known}
    if rest or any(values and found.get(key) not in values for key, values in known):
        only = " or ".join(_FORMAT_NAMES[name] for name in formats)
        raise UserError(
            f"{hf.path}: 'quantization_config' is {found!r}: weights quantised by {method!r} in "
            f"this form cannot be read; only {only} is supported here. Use the unquantised "
            f"checkpoint."
        )
    kind = _FORMAT_NAMES[str(method)].split()[0]
    notes.append(f"the files hold {kind} weights with scales; training starts from their products")


def constants(**values: Any) -> Reader:
    """A reader that gives fixed Megatron arguments."""
    return lambda hf, notes: dict(values)


def decoder(
    hf: HFConfig,
    notes: list[str],
    formats: Mapping[str, Format] = FP8_BLOCKS,
    width: str = "intermediate_size",
) -> dict[str, Any]:
    """A pre-norm decoder with grouped queries.

    Args:
        hf: The configuration.
        notes: What a user should know is added here.
        formats: Low-precision formats that the files may hold weights in.
        width: Config key of the MLP's size.
    """
    heads = positive(hf, "num_attention_heads")
    groups = hf.typed("num_key_value_heads", heads, int)
    hidden = positive(hf, "hidden_size")
    if groups < 1 or heads % groups:
        raise UserError(
            f"{hf.path}: 'num_attention_heads' {heads} is not a multiple of "
            f"'num_key_value_heads' {groups}."
        )
    head_dim = positive(hf, "head_dim") if hf.get("head_dim") is not None else None
    if head_dim is None:
        if hidden % heads:
            raise UserError(
                f"{hf.path}: 'hidden_size' {hidden} is not a multiple of 'num_attention_heads' "
                f"{heads}, and there is no 'head_dim'. Add it."
            )
        head_dim = hidden // heads
    return common(hf, notes, formats, width) | {
        "group_query_attention": True,
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "qk_layernorm": False,
    }


def common(
    hf: HFConfig,
    notes: list[str],
    formats: Mapping[str, Format] = FP8_BLOCKS,
    width: str = "intermediate_size",
) -> dict[str, Any]:
    """Sizes, norms, initialisation, dropout, tying and vocabulary; see `decoder`."""
    stored_weights(hf, notes, formats)
    vocab = positive(hf, "vocab_size")
    padded = padded_vocab_size(vocab)
    if padded != vocab:
        notes.append(
            f"vocabulary padded from {vocab} to {padded} rows (a multiple of {VOCAB_MULTIPLE}, the "
            f"same at every TP); padded rows never enter softmax"
        )
    std = hf.number("initializer_range", _POSITIVE)
    notes.append(
        f"{FROM_SCRATCH}: std {std:g}; for the last projection of attention and MLP "
        f"Megatron divides it by sqrt(2 * layers), which transformers does not"
    )
    return {
        "num_layers": positive(hf, "num_hidden_layers"),
        "hidden_size": positive(hf, "hidden_size"),
        "ffn_hidden_size": positive(hf, width),
        "num_attention_heads": positive(hf, "num_attention_heads"),
        "max_position_embeddings": positive(hf, "max_position_embeddings"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.number("rms_norm_eps", _POSITIVE),
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "attention_dropout": hf.number("attention_dropout", Range(0, 1, below=True), 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": std,
        "untie_embeddings_and_output_weights": not hf.typed("tie_word_embeddings", False, bool),
        "vocab_size": vocab,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
    }


def windows(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """A sliding window in the layers that may have one, where ``sliding_window`` is not null.

    Transformers counts a query's own key among the ``sliding_window`` keys that it sees, Megatron
    those before it.
    """
    if hf.get("sliding_window") is None:
        return {}
    size = positive(hf, "sliding_window")
    notes.append(f"in a window a query sees its own and the {size - 1} keys before it")
    return {"window_size": f"{size - 1},0"}


def layer_types(hf: HFConfig, kinds: tuple[str, ...]) -> list[str] | None:
    """The key ``layer_types``: one of ``kinds`` for each layer; None where it is absent."""
    count = positive(hf, "num_hidden_layers")
    types: list[str] | None = hf.typed("layer_types", None, list)
    if types is not None and (len(types) != count or any(kind not in kinds for kind in types)):
        raise UserError(
            f"{hf.path}: 'layer_types' has {len(types)} entries; expected {count} "
            f"('num_hidden_layers'), each {' or '.join(map(repr, kinds))}."
        )
    return types


def windows_in(hf: HFConfig, notes: list[str], types: Sequence[str]) -> dict[str, Any]:
    """`windows` in the layers whose type is the first of `WINDOWED`."""
    chosen, size = [int(kind == WINDOWED[0]) for kind in types], hf.get("sliding_window")
    if not any(chosen):
        return {}
    if size is None:
        raise UserError(
            f"{hf.path}: 'sliding_window' is missing, but 'layer_types' names {WINDOWED[0]!r}."
        )
    sizes = windows(hf, notes)
    return sizes if all(chosen) else sizes | {"window_attn_skip_freq": chosen}


def uses_windows(hf: HFConfig) -> bool:
    """Whether ``use_sliding_window`` is on; there has to be a ``sliding_window`` then."""
    used: bool = hf.typed("use_sliding_window", False, bool)
    if used and hf.get("sliding_window") is None:
        raise UserError(
            f"{hf.path}: 'use_sliding_window' is true, but 'sliding_window' is missing. Every size "
            f"comes from this file: add it, or set the switch to false."
        )
    return used


def chosen_windows(has: Callable[[int, int], bool]) -> Reader:
    """A reader of Qwen's windows: those that ``layer_types`` names, where windows are used at all.

    Args:
        has: Whether a layer has one in a file without ``layer_types``, from its number and
            ``max_window_layers``.
    """

    def read(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
        types = layer_types(hf, WINDOWED)
        used = uses_windows(hf)
        if not used and types is not None and WINDOWED[0] in types:
            raise UserError(
                f"{hf.path}: 'layer_types' names {WINDOWED[0]!r}, but 'use_sliding_window' is "
                f"false. Keep the right one."
            )
        if not used:
            return {}
        if types is None:
            edge = hf.require("max_window_layers")
            count = positive(hf, "num_hidden_layers")
            types = [WINDOWED[0 if has(i, edge) else 1] for i in range(count)]
        return windows_in(hf, notes, types)

    return read


def shared_expert(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """A shared expert beside the routed ones, weighed with a sigmoid of its own."""
    return {
        "moe_shared_expert_intermediate_size": positive(hf, "shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def moe(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Experts and a softmax router; which layers have them is `sparse_layers`'."""
    normalised = hf.require("norm_topk_prob", bool)
    return softmax_experts(hf, notes, sparse_layers(hf), "moe_intermediate_size", normalised)


def softmax_experts(
    hf: HFConfig,
    notes: list[str],
    layers: tuple[LayerSpec, ...],
    width: str,
    normalised: bool,
    balanced: bool = True,
) -> dict[str, Any]:
    """Experts and a softmax router with HF's semantics.

    Transformers takes the top k of the softmax over all experts and, where they are normalised,
    divides them by their sum; that equals a softmax over the top k logits.

    Args:
        hf: The configuration.
        notes: What a user should know is added here.
        layers: The layer plan.
        width: Config key of an expert's size.
        normalised: Whether the gates of the chosen experts sum to 1.
        balanced: Whether the balancing loss that the config names counts.
    """
    top_k, experts = positive(hf, "num_experts_per_tok"), positive(hf, "num_experts")
    if top_k > experts:
        raise UserError(
            f"{hf.path}: 'num_experts_per_tok' {top_k} exceeds 'num_experts' {experts}."
        )
    if normalised and top_k == 1:
        raise UserError(
            f"{hf.path}: gates that sum to 1 ('norm_topk_prob', where it is a choice) with "
            f"'num_experts_per_tok' 1 make every gate 1, and the router would get no gradient."
        )
    coefficient = hf.number("router_aux_loss_coef", Range(0))
    if coefficient and not balanced:
        notes.append(
            f"no load-balancing loss: output_router_logits is false, and transformers then adds "
            f"none either (router_aux_loss_coef {coefficient:g}); --moe-aux-loss-coeff adds one"
        )
        coefficient = 0.0
    if coefficient:
        notes.append(
            f"load-balancing loss with coefficient {coefficient:g} (router_aux_loss_coef; "
            f"transformers adds it only where output_router_logits is set). Megatron's term is "
            f"that of transformers divided by the top-k {top_k}, summed over the MoE layers; "
            f"--moe-aux-loss-coeff 0 turns it off"
        )
    sparse = [int(layer.mlp == "moe") for layer in layers]
    return {
        "num_experts": experts,
        "moe_ffn_hidden_size": positive(hf, width),
        "moe_layer_freq": 1 if all(sparse) else sparse,
        "moe_router_topk": top_k,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": coefficient,
    }


def dense_layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """The same attention and gated MLP in every layer."""
    return (LayerSpec("gqa", "dense"),) * positive(hf, "num_hidden_layers")


def sparse_layers(hf: HFConfig) -> tuple[LayerSpec, ...]:
    """Layer ``i`` has experts where ``i + 1`` is a multiple of ``decoder_sparse_step``.

    Layers in ``mlp_only_layers`` have none.
    """
    count = hf.require("num_hidden_layers")
    step, dense = positive(hf, "decoder_sparse_step"), hf.typed("mlp_only_layers", [], list)
    if any(type(i) is not int or not 0 <= i < count for i in dense):
        raise UserError(
            f"{hf.path}: 'mlp_only_layers' is {dense!r}; expected layer numbers from 0 to "
            f"{count - 1}."
        )
    layers = tuple(
        LayerSpec("gqa", "moe" if i not in dense and (i + 1) % step == 0 else "dense")
        for i in range(count)
    )
    if all(layer.mlp == "dense" for layer in layers):
        raise UserError(
            f"{hf.path}: 'decoder_sparse_step' {step} and 'mlp_only_layers' {dense!r} leave no MoE "
            f"layer among {count}; such a model is a dense one."
        )
    return layers


@dataclass(frozen=True)
class MoeNames:
    """What HF files call the parts of a layer with experts.

    Attributes:
        block: The whole of it.
        shared: The shared expert.
        gate: An expert's first projection, whose result goes through the activation.
        up: Its second one.
        down: Its last one.
        router: The router.
        joined: One projection of experts with the rows of both first ones in turns; nothing: they
            are two.
    """

    block: str = "mlp."
    shared: str = "shared_experts."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    joined: str = ""


@dataclass(frozen=True)
class MtpNames:
    """What HF files call the parts of a layer for multi-token prediction.

    Attributes:
        layer: Its decoder layer; ``{0}`` is its number after the decoder's, ``{1}`` its own.
        around: What the names around it begin with; nothing: as the layer's.
        embedding_norm: The norm of the embedding.
        hidden_norm: The norm of the hidden state.
        join: The projection of both.
        final_norm: The last norm.
    """

    layer: str = "model.layers.{0}."
    around: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    join: str = "eh_proj"
    final_norm: str = "shared_head.norm"


#: Of Qwen3-Next and Qwen3.5.
QWEN_MTP = MtpNames(
    layer="mtp.layers.{1}.",
    around="mtp.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    join="fc",
    final_norm="norm",
)


def decoder_rules(
    spec: ModelSpec,
    moe: MoeNames = MoeNames(),
    mtp: MtpNames = MtpNames(),
    delta_apart: bool = False,
) -> tuple[Rule, ...]:
    """Weight rules of a pre-norm decoder with Llama's HF names, as its arguments and layers say.

    Args:
        spec: The resolved model.
        moe: Names of layers with experts.
        mtp: Names of layers for multi-token prediction.
        delta_apart: Whether files keep the four projections of Gated DeltaNet apart.
    """
    args, hidden = spec.args, spec.args["hidden_size"]
    vocab = PadVocab(spec.true_vocab_size, spec.padded_vocab_size)
    vocab_shape = ((spec.true_vocab_size, hidden),)
    rules = [Rule("embedding.weight", (embedding(spec),), vocab_shape, vocab)]
    for number, layer in enumerate(spec.layers):
        theirs = f"{spec.prefix}layers.{number}."
        rules += _layer_rules(args, layer, f"layers.{number}.", theirs, moe, delta_apart)
    for number, layer in enumerate(spec.mtp):
        theirs = mtp.layer.format(len(spec.layers) + number, number)
        rules += _mtp_rules(args, f"mtp.{number}.", mtp, theirs)
        rules += _layer_rules(args, layer, f"mtp.{number}.", theirs, moe, delta_apart)
    rules.append(_rename("final_norm.weight", f"{spec.prefix}norm.weight", hidden))
    if not spec.tied:
        rules.append(Rule("head.weight", ("lm_head.weight",), vocab_shape, vocab))
    return tuple(rules)


def expert_stacks(spec: ModelSpec) -> tuple[Stack, ...]:
    """Two tensors a layer in which files may hold all its experts, as Qwen3.5's do."""
    hidden, width = spec.args["hidden_size"], spec.args["moe_ffn_hidden_size"]
    count = spec.args["num_experts"]
    places = [f"{spec.prefix}layers.{n}." for n, one in enumerate(spec.layers) if one.mlp == "moe"]
    places += [QWEN_MTP.layer.format(0, n) for n, one in enumerate(spec.mtp) if one.mlp == "moe"]
    found = []
    for place in places:
        block = f"{place}mlp.experts."
        pairs = [f"{block}{e}.{half}_proj.weight" for e in range(count) for half in ("gate", "up")]
        downs = [f"{block}{e}.down_proj.weight" for e in range(count)]
        both, down = (count, 2 * width, hidden), (count, hidden, width)
        found += [
            Stack(f"{block}gate_up_proj", both, tuple(pairs), (width, hidden)),
            Stack(f"{block}down_proj", down, tuple(downs), (hidden, width)),
        ]
    return tuple(found)


def mtp_copies(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    """What files of models with MTP may repeat for each such layer: the embedding and the head."""
    table = embedding(spec)
    head = table if spec.tied else HEAD
    return tuple(
        pair
        for number in range(len(spec.layers), len(spec.layers) + len(spec.mtp))
        for pair in (
            (f"model.layers.{number}.embed_tokens.weight", table),
            (f"model.layers.{number}.shared_head.head.weight", head),
        )
    )


def _layer_rules(
    args: dict[str, Any], layer: LayerSpec, ours: str, theirs: str, moe: MoeNames, apart: bool
) -> list[Rule]:
    if layer.attention == "mla":
        rules = _latent_rules(args, ours + "latent.", theirs)
    elif layer.attention == "delta":
        rules = _delta_rules(args, ours + "delta.", theirs, apart)
    else:
        rules = _attention_rules(args, ours + "attention.", theirs)
    if layer.mlp == "moe":
        return rules + _moe_rules(args, ours + "moe.", theirs, moe)
    return rules + _mlp_rules(args, ours + "mlp.", theirs)


def _mtp_rules(args: dict[str, Any], ours: str, names: MtpNames, layer: str) -> list[Rule]:
    """Around the decoder layer: norms of both inputs, their projection, and the last norm."""
    hidden, theirs = args["hidden_size"], names.around or layer
    return [
        _rename(f"{ours}embedding_norm.weight", f"{theirs}{names.embedding_norm}.weight", hidden),
        _rename(f"{ours}hidden_norm.weight", f"{theirs}{names.hidden_norm}.weight", hidden),
        _rename(f"{ours}join.weight", f"{theirs}{names.join}.weight", hidden, 2 * hidden),
        _rename(f"{ours}final_norm.weight", f"{theirs}{names.final_norm}.weight", hidden),
    ]


def _latent_rules(args: dict[str, Any], ours: str, theirs: str) -> list[Rule]:
    """Latent attention; both sides keep the rotated channels in interleaved pairs."""
    hidden, heads = args["hidden_size"], args["num_attention_heads"]
    nope, rotated, value = args["qk_head_dim"], args["qk_pos_emb_head_dim"], args["v_head_dim"]
    q_rank, kv_rank, q_rows = args["q_lora_rank"], args["kv_lora_rank"], heads * (nope + rotated)
    attention = f"{theirs}self_attn."
    rules = [_rename(f"{ours}norm.weight", f"{theirs}input_layernorm.weight", hidden)]
    if q_rank is None:
        rules.append(_rename(f"{ours}q.weight", f"{attention}q_proj.weight", q_rows, hidden))
    else:
        rules += [
            _rename(f"{ours}q_down.weight", f"{attention}q_a_proj.weight", q_rank, hidden),
            _rename(f"{ours}q_norm.weight", f"{attention}q_a_layernorm.weight", q_rank),
            _rename(f"{ours}q_up.weight", f"{attention}q_b_proj.weight", q_rows, q_rank),
        ]
    down, up = kv_rank + rotated, heads * (nope + value)
    return [
        *rules,
        _rename(f"{ours}kv_down.weight", f"{attention}kv_a_proj_with_mqa.weight", down, hidden),
        _rename(f"{ours}kv_norm.weight", f"{attention}kv_a_layernorm.weight", kv_rank),
        _rename(f"{ours}kv_up.weight", f"{attention}kv_b_proj.weight", up, kv_rank),
        _rename(f"{ours}out.weight", f"{attention}o_proj.weight", hidden, heads * value),
    ]


def _attention_rules(args: dict[str, Any], ours: str, theirs: str) -> list[Rule]:
    heads, groups = args["num_attention_heads"], args["num_query_groups"]
    head_dim, hidden = args["kv_channels"], args["hidden_size"]
    gated = args.get("attention_output_gate", False)
    interleave = (GatedQKV if gated else GroupedQKV)(groups, heads // groups, head_dim)
    rows = (heads * head_dim * (2 if gated else 1), groups * head_dim, groups * head_dim)
    projections = tuple(f"{theirs}self_attn.{part}_proj" for part in "qkv")
    rules = [
        _rename(f"{ours}norm.weight", f"{theirs}input_layernorm.weight", hidden),
        Rule(
            f"{ours}qkv.weight",
            tuple(f"{name}.weight" for name in projections),
            tuple((count, hidden) for count in rows),
            interleave,
        ),
        _rename(f"{ours}out.weight", f"{theirs}self_attn.o_proj.weight", hidden, heads * head_dim),
    ]
    if args["add_qkv_bias"] or args["add_bias_linear"]:
        names = tuple(f"{name}.bias" for name in projections)
        rules.append(Rule(f"{ours}qkv.bias", names, tuple((count,) for count in rows), interleave))
    if args["add_bias_linear"]:
        rules.append(_rename(f"{ours}out.bias", f"{theirs}self_attn.o_proj.bias", hidden))
    if args.get("softmax_type") == "learnable":
        rules.append(_rename(f"{ours}sinks", f"{theirs}self_attn.sinks", heads))
    if args["qk_layernorm"]:
        for part in "qk":
            name = f"{theirs}self_attn.{part}_norm.weight"
            rules.append(_rename(f"{ours}{part}_norm.weight", name, head_dim))
    return rules


def _delta_rules(args: dict[str, Any], ours: str, theirs: str, apart: bool) -> list[Rule]:
    """Gated DeltaNet; two projections in HF files, or four, are one in Megatron's."""
    hidden, inner = args["hidden_size"], f"{theirs}linear_attn."
    heads, values = args["linear_num_key_heads"], args["linear_num_value_heads"]
    width, size = args["linear_key_head_dim"], args["linear_value_head_dim"]
    ratio = values // heads
    channels = 2 * heads * width + values * size
    kinds: tuple[str, ...] = ("qkvz", "ba")
    rows: tuple[int, ...] = (channels + values * size, 2 * values)
    operation: Operation = DeltaHeads(heads, width, ratio * size, ratio)
    if apart:
        kinds, rows = ("qkv", "z", "b", "a"), (channels, values * size, values, values)
        operation = Joined(rows)
    return [
        _rename(f"{ours}norm.weight", f"{theirs}input_layernorm.weight", hidden),
        Rule(
            f"{ours}in.weight",
            tuple(f"{inner}in_proj_{kind}.weight" for kind in kinds),
            tuple((count, hidden) for count in rows),
            operation,
        ),
        _rename(
            f"{ours}conv.weight",
            f"{inner}conv1d.weight",
            *(channels, 1, args["linear_conv_kernel_dim"]),
        ),
        _rename(f"{ours}step", f"{inner}dt_bias", values),
        _rename(f"{ours}decay", f"{inner}A_log", values),
        _rename(f"{ours}out_norm.weight", f"{inner}norm.weight", size),
        _rename(f"{ours}out.weight", f"{inner}out_proj.weight", hidden, values * size),
    ]


def _mlp_rules(args: dict[str, Any], ours: str, theirs: str) -> list[Rule]:
    hidden, size = args["hidden_size"], args["ffn_hidden_size"]
    rules = [_rename(f"{ours}norm.weight", f"{theirs}post_attention_layernorm.weight", hidden)]
    rules += _gated_rules(f"{ours}", f"{theirs}mlp.", hidden, size)
    if args["add_bias_linear"]:
        names = (f"{theirs}mlp.gate_proj.bias", f"{theirs}mlp.up_proj.bias")
        rules.append(Rule(f"{ours}gate_up.bias", names, ((size,), (size,)), GatedUp()))
        rules.append(_rename(f"{ours}down.bias", f"{theirs}mlp.down_proj.bias", hidden))
    return rules


def _moe_rules(args: dict[str, Any], ours: str, theirs: str, names: MoeNames) -> list[Rule]:
    hidden, experts = args["hidden_size"], args["num_experts"]
    block = theirs + names.block
    rules = [
        _rename(f"{ours}norm.weight", f"{theirs}post_attention_layernorm.weight", hidden),
        _rename(f"{ours}router.weight", f"{block}{names.router}.weight", experts, hidden),
    ]
    if args["add_bias_linear"]:
        rules.append(_rename(f"{ours}router.offset", f"{block}{names.router}.bias", experts))
    if args.get("moe_router_enable_expert_bias"):
        bias = (f"{block}gate.e_score_correction_bias",)
        shape = ((experts,),)
        rules.append(Rule(f"{ours}router.bias", bias, shape, Rename(), keeps_dtype=True))
    shared = args.get("moe_shared_expert_intermediate_size")
    if shared:
        rules += _gated_rules(f"{ours}shared.", block + names.shared, hidden, shared)
    if args.get("moe_shared_expert_gate"):
        name = f"{block}{names.shared[:-1]}_gate.weight"
        rules.append(_rename(f"{ours}shared.gate.weight", name, 1, hidden))
    for e in range(experts):
        inner, width = f"{block}experts.{e}.", args["moe_ffn_hidden_size"]
        if names.joined:
            rules += _joined_rules(f"{ours}experts.{e}.", inner, hidden, width, names)
            continue
        rules += _gated_rules(f"{ours}experts.{e}.", inner, hidden, width, names)
    return rules


def _gated_rules(
    ours: str,
    theirs: str,
    hidden: int,
    size: int,
    names: MoeNames = MoeNames(),
) -> list[Rule]:
    pair = (f"{theirs}{names.gate}.weight", f"{theirs}{names.up}.weight")
    return [
        Rule(f"{ours}gate_up.weight", pair, ((size, hidden), (size, hidden)), GatedUp()),
        _rename(f"{ours}down.weight", f"{theirs}{names.down}.weight", hidden, size),
    ]


def _joined_rules(ours: str, theirs: str, hidden: int, size: int, names: MoeNames) -> list[Rule]:
    """An expert with biases, the rows of gate and up in turns."""
    both, down = f"{theirs}{names.joined}.", f"{theirs}{names.down}."
    return [
        Rule(f"{ours}gate_up.weight", (f"{both}weight",), ((2 * size, hidden),), Alternating()),
        Rule(f"{ours}gate_up.bias", (f"{both}bias",), ((2 * size,),), Alternating()),
        _rename(f"{ours}down.weight", f"{down}weight", hidden, size),
        _rename(f"{ours}down.bias", f"{down}bias", hidden),
    ]


def _rename(ours: str, theirs: str, *shape: int) -> Rule:
    return Rule(ours, (theirs,), (shape,), Rename())


def positive(hf: HFConfig, key: str) -> int:
    """A size that must be there and at least 1."""
    value: int = hf.require(key)
    if value < 1:
        raise UserError(f"{hf.path}: {key!r} is {value}; expected a positive number.")
    most = dict(_MOST).get(key, (1 << 31) - 1)
    if value > most:
        raise UserError(f"{hf.path}: {key!r} is {value}; expected at most {most}.")
    return value
