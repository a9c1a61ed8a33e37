"""What a model family is: the whole contract between a family file and the rest of the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_patch.models.rope import RopeSpec, attention_factor, is_plain, read_rope
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron_patch.convert.rules import Rule, Stack
    from megatron_patch.models.hf_config import HFConfig

#: Every padded vocabulary is a multiple of this, whatever the tensor-parallel size: 128 splits
#: evenly up to TP 128 and leaves each rank a multiple of 8 rows up to TP 16. Fewer than 8 throws
#: the output GEMMs onto kernels that halve the speed of a whole step.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer of the layer plan.

    Attributes:
        attention: ``gqa``: softmax attention with grouped queries (any group count); ``mla``:
            latent attention (low-rank keys and values, DeepSeek); ``delta``: Gated DeltaNet.
        mlp: ``dense`` (gated) or ``moe`` (routed gated experts).
    """

    attention: str
    mlp: str


@dataclass(frozen=True)
class ModelSpec:
    """A model, resolved from its config alone.

    Attributes:
        family: Name of the family.
        args: Megatron argparse dest -> value, JSON-able.
        rope: The rotary embedding; `rope.apply_rope` writes it into the built model.
        layers: The layer plan, one entry per decoder layer.
        true_vocab_size: Rows of the vocabulary that mean something.
        padded_vocab_size: Rows of the embedding and of the output layer, the same at every TP.
            Rows from ``true_vocab_size`` on never enter softmax, decoding or export.
        tied: Whether the output layer is the embedding.
        notes: What was defaulted, approximated or ignored, for the log.
        mtp: The layers that predict further tokens, after the decoder's.
        latent_norm_epsilon: Epsilon of the norms on MLA's low-rank projections, where it is not
            that of the other norms.
        groups_by_best: How many of a group's best experts speak for it in group-limited routing,
            where Megatron-Core's own formula (top-k / groups chosen) gives another number.
        prefix: What the names of the decoder's tensors begin with in files.
    """

    family: str
    args: dict[str, Any]
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    true_vocab_size: int
    padded_vocab_size: int
    tied: bool
    notes: tuple[str, ...]
    mtp: tuple[LayerSpec, ...] = ()
    latent_norm_epsilon: float | None = None
    groups_by_best: int | None = None
    prefix: str = "model."


@dataclass(frozen=True)
class Only:
    """A config key of which this package supports some values only.

    Attributes:
        key: The key.
        values: Accepted values; an absent key is accepted, ``null`` counts as the first one.
        why: What the other values would do, and what to do instead.
    """

    key: str
    values: tuple[Any, ...]
    why: str


#: Reads keys of a config into Megatron arguments; appends what a user should know to the list.
Reader = Callable[["HFConfig", list[str]], dict[str, Any]]


@dataclass(frozen=True)
class ModelFamily:
    """Everything that tells one family from another; immutable.

    Attributes:
        name: HF ``model_type``; the family's file has the same name.
        hf_defaults: Keys that a ``config.json`` may omit, with the HF class's value. Sizes are not
            among them.
        args: Readers from config keys to Megatron arguments; later ones win.
        layers: The layer plan.
        rules: Weight rules of a resolved model, covering every name of both sides once.
        only: Keys of which some values are refused.
        inert: Pairs (key, why it changes nothing in training).
        aliases: Pairs (other spelling of a config key, ours).
        known_theta: Rope base of a file without one, where that is certain; else None.
        partial_rotary: Whether ``partial_rotary_factor`` may rotate a part of a head only.
        mtp: The plan of the layers that predict further tokens.
        details: Further attributes of the resolved model, by name (`ModelSpec`).
        left_out: Pairs (pattern of names in files that are no part of the model, what they are).
        mtp_names: Pattern of the names of layers for multi-token prediction, where those are not
            numbered after the decoder's.
        mtp_key: Config key of their number.
        copies: Pairs (HF name under which files may repeat a tensor, that tensor's name).
        stacks: Tensors in which files hold those of several rules.
    """

    name: str
    hf_defaults: tuple[tuple[str, Any], ...]
    args: tuple[Reader, ...]
    layers: Callable[[HFConfig], tuple[LayerSpec, ...]]
    rules: Callable[[ModelSpec], tuple[Rule, ...]]
    only: tuple[Only, ...]
    inert: tuple[tuple[str, str], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    known_theta: Callable[[HFConfig], float | None] = lambda hf: None
    partial_rotary: bool = False
    mtp: Callable[[HFConfig], tuple[LayerSpec, ...]] = lambda hf: ()
    details: Callable[[HFConfig], dict[str, Any]] = lambda hf: {}
    copies: Callable[[ModelSpec], tuple[tuple[str, str], ...]] = lambda spec: ()
    left_out: tuple[tuple[str, str], ...] = ()
    mtp_names: str = ""
    mtp_key: str = "num_nextn_predict_layers"
    stacks: Callable[[ModelSpec], tuple[Stack, ...]] = lambda spec: ()

    def resolve(self, hf: HFConfig) -> ModelSpec:
        """Turn a config into a model.

        Raises:
            UserError: A key is missing, malformed, of an unsupported value, or not known to this
                family; the message names file, key, value and remedy.
        """
        if hf.model_type not in (self.name, *other_names(self.name)):
            raise UserError(f"{hf.path}: model_type is {hf.model_type!r}, not {self.name!r}.")
        hf = hf.view(self.aliases, self.hf_defaults)
        notes: list[str] = []
        self._refuse_conflicts(hf)
        self._refuse_unsupported(hf)
        args: dict[str, Any] = {}
        for reader in self.args:
            args.update(reader(hf, notes))
        theta = self.known_theta(hf)
        latent = args.get("multi_latent_attention", False)
        head_dim = args["qk_pos_emb_head_dim" if latent else "kv_channels"]
        rope = read_rope(
            hf,
            head_dim,
            args["max_position_embeddings"],
            theta,
            partial=self.partial_rotary,
            inert={key for key, _ in self.inert},
        )
        if theta is not None and rope.theta == theta:
            notes.append(f"rope base {theta:g}: the file predates the key")
        args |= _latent_rope_args(hf, rope) if latent else _rope_args(rope, head_dim)
        layers, mtp, details = self.layers(hf), self.mtp(hf), self.details(hf)
        if mtp:
            args["mtp_num_layers"] = len(mtp)
            if isinstance(args.get("linear_attention_freq"), list):
                # Upstream's count of operations wants one entry for each of these layers, too; the
                # model's own list is cut where its layers are made (`modules.gated_delta`).
                args["linear_attention_freq"] += [int(one.attention == "delta") for one in mtp]
            notes.append(_mtp_note(len(mtp), self.mtp_key))
        self._refuse_unknown(hf)
        for key, value in hf.defaulted:
            notes.append(f"{key} is not in {hf.path.name}: {value!r}, as in transformers")
        vocab = hf.require("vocab_size")
        return ModelSpec(
            family=self.name,
            args=args,
            rope=rope,
            layers=layers,
            true_vocab_size=vocab,
            padded_vocab_size=args["padded_vocab_size"],
            tied=not args["untie_embeddings_and_output_weights"],
            notes=tuple(notes),
            mtp=mtp,
            **details,
        )

    def _refuse_conflicts(self, hf: HFConfig) -> None:
        inert = {key for key, _ in self.inert} | {"architectures"}
        for key, outer, inner in hf.conflicts:
            if key not in inert:
                raise UserError(
                    f"{hf.path}: {key!r} is {outer!r}, but {inner!r} in 'text_config'. Keep the "
                    f"right one."
                )

    def _refuse_unsupported(self, hf: HFConfig) -> None:
        for name in hf.typed("architectures", [], list):
            if not isinstance(name, str):
                raise UserError(
                    f"{hf.path}: 'architectures' holds {name!r}; expected names of classes."
                )
            heads = ("ForCausalLM", "Model") + (("ForConditionalGeneration",) if hf.nested else ())
            if not name.endswith(heads):
                raise UserError(
                    f"{hf.path}: 'architectures' names {name}, which has another head than a "
                    f"language model's. Use the checkpoint that it was made from."
                )
        for only in self.only:
            value = hf.get(only.key, only.values[0])
            # Not `in`: 0 == False and 1 == True there.
            if not any(value == v and type(value) is type(v) for v in only.values):
                accepted = " or ".join(repr(v) for v in only.values)
                raise UserError(
                    f"{hf.path}: {only.key!r} is {value!r}; model_type {self.name!r} supports "
                    f"{accepted} here: {only.why}"
                )

    def _refuse_unknown(self, hf: HFConfig) -> None:
        known = hf.keys_read | {"model_type"} | {key for key, _ in self.inert}
        unknown = [f"{key!r} = {value!r}" for key, value in hf.data.items() if key not in known]
        if unknown:
            raise UserError(
                f"{hf.path}: {', '.join(unknown)}: model_type {self.name!r} does not know what "
                f"this changes. Where it only records how the file was made, delete it; "
                f"where it changes the network, this model is not supported."
            )


#: HF model types whose architecture is that of another type, which has the file: (type, file).
ALIASES: tuple[tuple[str, str], ...] = (
    ("kimi_k2", "deepseek_v3"),
    ("qwen3_5_text", "qwen3_5"),
    ("qwen3_5_moe_text", "qwen3_5_moe"),
)


def other_names(name: str) -> tuple[str, ...]:
    """The other model types that mean the family ``name``."""
    return tuple(alias for alias, family in ALIASES if family == name)


def padded_vocab_size(vocab_size: int) -> int:
    """The one padded size of a vocabulary, independent of the tensor-parallel size."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _mtp_note(count: int, key: str) -> str:
    return (
        f"{count} layer{'s' if count > 1 else ''} for multi-token prediction: trained along with "
        f"Megatron's weight of 0.1 (--mtp-loss-scaling-factor); transformers' training ignores "
        f"them. To train without, set {key} to 0"
    )


def _rope_args(rope: RopeSpec, head_dim: int) -> dict[str, Any]:
    """Plain rope for Megatron's flags; `rope.apply_rope` makes it exact after building."""
    args: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": round(rope.theta),
        "rotary_percent": rope.dim / head_dim,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
    }
    if not is_plain(rope) and attention_factor(rope) != 1.0:
        # The fused kernel multiplies nothing, and for packed sequences says nothing either.
        args["apply_rope_fusion"] = False
    return args


def _latent_rope_args(hf: HFConfig, rope: RopeSpec) -> dict[str, Any]:
    """The rope of latent attention, which has a rope of its own and knows YaRN.

    Megatron derives two numbers: cos and sin are multiplied with ``m(mscale) / m(mscale_all_dim)``
    and the softmax scale with ``m(mscale_all_dim) ** 2``, where ``m(w) = 0.1 w ln(factor) + 1``.
    Transformers has the same softmax scale, and `attention_factor` for cos and sin. The
    frequencies are written after building (`rope.apply_rope`): their bounds have no flags.
    """
    args = _rope_args(rope, rope.dim) | {"rope_type": "rope", "apply_rope_fusion": False}
    if rope.type != "yarn":
        return args
    del args["apply_rope_fusion"]
    every = rope.mscale_all_dim or 0.0
    return args | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.factor,
        "mscale": _latent_mscale(hf, rope, every),
        "mscale_all_dim": every,
    }


def _latent_mscale(hf: HFConfig, rope: RopeSpec, every: float) -> float:
    """Megatron's ``mscale`` with which cos and sin get transformers' attention factor."""
    if rope.attention_factor is None and rope.mscale and every:
        return rope.mscale
    wanted = attention_factor(rope)
    if rope.factor > 1:
        slope = 0.1 * math.log(rope.factor)
        return (wanted * (slope * every + 1) - 1) / slope
    if wanted != 1:
        raise UserError(
            f"{hf.path}: the rope's attention_factor is {wanted:g} at factor {rope.factor:g}; "
            f"Megatron's latent attention has one only where the factor exceeds 1."
        )
    return 1.0
