"""Parts that DeepSeek's families and GLM share: latent attention, shared experts, bias routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_patch.models import blocks
from megatron_patch.models.blocks import positive
from megatron_patch.models.family import LayerSpec, Only, Reader
from megatron_patch.util import Range, UserError

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig


#: Epsilon of transformers' norm class, which the norms on low-rank projections keep.
LATENT_NORM_EPSILON = 1e-6

#: `own_code` reads which code the model brings.
ONLY: tuple[Only, ...] = (
    *(only for only in blocks.ONLY if only.key != "auto_map"),
    Only("attention_bias", (False,), "Megatron's latent attention has no biases."),
    Only("pretraining_tp", (1,), "set it to 1; other values only change rounding."),
    Only(
        "moe_layer_freq",
        (1,),
        "transformers puts experts into every layer after the dense ones, the models' own code "
        "into every n-th; set it to 1 for the former.",
    ),
    Only("rope_interleave", (True,), "the rotated channels of these models stand in pairs."),
)

INERT: tuple[tuple[str, str], ...] = (
    ("ep_size", "expert parallelism of the model's own code; here it is --ep"),
    ("head_dim", "transformers sets it to qk_rope_head_dim"),
    ("qk_head_dim", "transformers sets it to qk_nope_head_dim + qk_rope_head_dim"),
    *blocks.MOE_INERT,
)


def own_code(*prefixes: str) -> Reader:
    """A reader that accepts remote code of the model's authors which transformers has taken over.

    Args:
        *prefixes: Modules whose classes are the network that the family builds.
    """

    def reader(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
        found = hf.typed("auto_map", None, dict) or {}
        if not all(str(name).split("--")[-1].startswith(prefixes) for name in found.values()):
            raise UserError(
                f"{hf.path}: 'auto_map' is {found!r}: the model brings its own code, which may be "
                f"another network than {hf.model_type!r}."
            )
        return {}

    return reader


def latent_attention(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Sizes of latent attention (arXiv 2405.04434)."""
    heads = positive(hf, "num_attention_heads")
    if hf.typed("num_key_value_heads", heads, int) != heads:
        raise UserError(
            f"{hf.path}: 'num_key_value_heads' {hf.get('num_key_value_heads')} is not "
            f"'num_attention_heads' {heads}; latent attention has keys and values for every head."
        )
    if "q_lora_rank" not in hf:
        raise UserError(
            f"{hf.path}: 'q_lora_rank' is missing; write null where queries have no low rank."
        )
    return {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "qk_layernorm": True,
        "q_lora_rank": None if hf.get("q_lora_rank") is None else positive(hf, "q_lora_rank"),
        "kv_lora_rank": positive(hf, "kv_lora_rank"),
        "qk_head_dim": positive(hf, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": positive(hf, "qk_rope_head_dim"),
        "v_head_dim": positive(hf, "v_head_dim"),
    }


def experts(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Routed experts in every layer after the dense ones, and shared ones beside them."""
    top_k, routed = positive(hf, "num_experts_per_tok"), positive(hf, "n_routed_experts")
    if top_k > routed:
        raise UserError(
            f"{hf.path}: 'num_experts_per_tok' {top_k} exceeds 'n_routed_experts' {routed}."
        )
    width = positive(hf, "moe_intermediate_size")
    scale = hf.number("routed_scaling_factor", Range(0, above=True))
    if not 0 < scale < float("inf"):
        raise UserError(f"{hf.path}: 'routed_scaling_factor' is {scale}; expected above 0.")
    sparse = [int(layer.mlp == "moe") for layer in layers("gqa")(hf)]
    return {
        "num_experts": routed,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * positive(hf, "n_shared_experts"),
        "moe_layer_freq": 1 if all(sparse) else sparse,
        "moe_router_topk": top_k,
        "moe_router_topk_scaling_factor": scale,
        "moe_router_dtype": "fp32",
    }


def sigmoid_router(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Sigmoid scores; a bias that no gradient moves chooses the experts (arXiv 2408.15664)."""
    if not hf.require("norm_topk_prob", bool):
        raise UserError(
            f"{hf.path}: 'norm_topk_prob' is false; Megatron-Core always divides the sigmoid "
            f"scores of the chosen experts by their sum, so this model is not supported."
        )
    top_k = hf.require("num_experts_per_tok")
    if top_k == 1:
        raise UserError(
            f"{hf.path}: 'norm_topk_prob' with 'num_experts_per_tok' 1 makes every gate 1, which "
            f"Megatron-Core leaves at the score; this model is not supported."
        )
    notes.append(
        "the bias that balances the experts moves by 0.001 a step towards those with too few "
        "tokens (--moe-router-bias-update-rate; 0 leaves it as it is)"
    )
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        **_groups(hf, 2),
    }


def softmax_router(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """Softmax over all experts; the gates of the chosen ones are not normalised."""
    groups = _groups(hf, 1)  # checked, whether they are used or not
    return {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        **(groups if group_limited(hf) else {}),
    }


def group_limited(hf: HFConfig) -> bool:
    """Whether a softmax router chooses groups of experts first."""
    return bool(hf.typed("topk_method", "greedy", str) == "group_limited_greedy")


def _groups(hf: HFConfig, best: int) -> dict[str, Any]:
    """Group-limited routing, where the groups limit anything."""
    groups, chosen = hf.typed("n_group", 1, int), hf.typed("topk_group", 1, int)
    routed, top_k = hf.require("n_routed_experts"), hf.require("num_experts_per_tok")
    if groups < 1 or routed % groups or routed // groups < best:
        raise UserError(
            f"{hf.path}: 'n_group' {groups} does not divide 'n_routed_experts' {routed} into "
            f"groups of at least {best}."
        )
    if not 1 <= chosen <= groups or top_k > chosen * (routed // groups):
        raise UserError(
            f"{hf.path}: 'topk_group' {chosen} of {groups} groups with {routed // groups} experts "
            f"each cannot give 'num_experts_per_tok' {top_k}."
        )
    if chosen == groups:
        return {}
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def groups_by_best(best: int) -> Callable[[HFConfig], int | None]:
    """Detail of a model whose groups are ranked by another rule than Megatron-Core's.

    Args:
        best: How many of a group's best experts speak for it.
    """

    def detail(hf: HFConfig) -> int | None:
        chosen, groups = hf.typed("topk_group", 1, int), hf.typed("n_group", 1, int)
        if chosen == groups or hf.require("num_experts_per_tok") // chosen == best:
            return None
        return best

    return detail


def balancing_loss(hf: HFConfig, notes: list[str]) -> dict[str, Any]:
    """The balancing loss of the models' own code; transformers has none."""
    coefficient = hf.number("aux_loss_alpha", Range(0), 0.0)
    by_sequence = hf.typed("seq_aux", True, bool)
    if coefficient:
        notes.append(
            f"load-balancing loss with coefficient {coefficient:g} (aux_loss_alpha), "
            f"{'by sequence' if by_sequence else 'by micro batch'} (seq_aux); "
            f"--moe-aux-loss-coeff 0 turns it off"
        )
    return {
        "moe_router_load_balancing_type": "seq_aux_loss" if by_sequence else "aux_loss",
        "moe_aux_loss_coeff": coefficient,
    }


def layers(attention: str) -> Callable[[HFConfig], tuple[LayerSpec, ...]]:
    """The plan of layers: ``first_k_dense_replace`` dense ones, then experts."""

    def plan(hf: HFConfig) -> tuple[LayerSpec, ...]:
        count, dense = positive(hf, "num_hidden_layers"), hf.require("first_k_dense_replace")
        if not 0 <= dense < count:
            raise UserError(
                f"{hf.path}: 'first_k_dense_replace' is {dense}, which leaves no MoE layer among "
                f"{count}; such a model is a dense one."
            )
        return tuple(LayerSpec(attention, "dense" if i < dense else "moe") for i in range(count))

    return plan


def mtp_layers(attention: str) -> Callable[[HFConfig], tuple[LayerSpec, ...]]:
    """The plan of the layers for multi-token prediction: ``num_nextn_predict_layers``."""

    def plan(hf: HFConfig) -> tuple[LayerSpec, ...]:
        count: int = hf.typed("num_nextn_predict_layers", 0, int)
        if count < 0:
            raise UserError(
                f"{hf.path}: 'num_nextn_predict_layers' is {count}; expected 0 or more."
            )
        if count and attention == "mla" and hf.get("q_lora_rank") is None:
            raise UserError(
                f"{hf.path}: 'num_nextn_predict_layers' {count} without 'q_lora_rank': "
                f"Megatron-Core norms the query of such a layer twice. Set it to 0."
            )
        return (LayerSpec(attention, "moe"),) * count

    return plan
