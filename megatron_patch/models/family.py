"""What a model family is: the whole contract between a family file and the rest of the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_patch.models.rope import RopeSpec, attention_factor, is_plain, read_rope
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron_patch.convert.rules import Rule
    from megatron_patch.models.hf_config import HFConfig

#: Every padded vocabulary is a multiple of this, whatever the tensor-parallel size: 128 splits
#: evenly up to TP 128 and leaves each rank a multiple of 8 rows up to TP 16. Fewer than 8 throws
#: the output GEMMs onto kernels that halve the speed of a whole step.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer of the layer plan.

    Attributes:
        attention: ``gqa``: softmax attention with grouped queries (any group count).
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
    """

    family: str
    args: dict[str, Any]
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    true_vocab_size: int
    padded_vocab_size: int
    tied: bool
    notes: tuple[str, ...]


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

    def resolve(self, hf: HFConfig) -> ModelSpec:
        """Turn a config into a model.

        Raises:
            UserError: A key is missing, malformed, of an unsupported value, or not known to this
                family; the message names file, key, value and remedy.
        """
        if hf.model_type != self.name:
            raise UserError(f"{hf.path}: model_type is {hf.model_type!r}, not {self.name!r}.")
        hf = hf.view(self.aliases, self.hf_defaults)
        notes: list[str] = []
        self._refuse_unsupported(hf)
        args: dict[str, Any] = {}
        for reader in self.args:
            args.update(reader(hf, notes))
        theta = self.known_theta(hf)
        rope = read_rope(hf, args["kv_channels"], args["max_position_embeddings"], theta)
        if theta is not None and rope.theta == theta:
            notes.append(f"rope base {theta:g}: the file predates the key")
        args |= _rope_args(rope)
        layers = self.layers(hf)
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
        )

    def _refuse_unsupported(self, hf: HFConfig) -> None:
        for name in hf.get("architectures", []):
            if not name.endswith(("ForCausalLM", "Model")):
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


def padded_vocab_size(vocab_size: int) -> int:
    """The one padded size of a vocabulary, independent of the tensor-parallel size."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _rope_args(rope: RopeSpec) -> dict[str, Any]:
    """Plain rope for Megatron's flags; `rope.apply_rope` makes it exact after building."""
    args: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": round(rope.theta),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
    }
    if not is_plain(rope) and attention_factor(rope) != 1.0:
        # The fused kernel multiplies nothing, and for packed sequences says nothing either.
        args["apply_rope_fusion"] = False
    return args
