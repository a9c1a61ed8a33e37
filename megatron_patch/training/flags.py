"""The numbers that flags may take: one table, for flags of ours and of Megatron alike."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_patch.util import Range

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
        "hysteresis per_device_train_batch_size gradient_accumulation_steps lora_rank",
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
        "manual_gc_interval rampup_batch_size null_tokenizer_eod_id",
    ),
    # Upstream refuses 0 with a traceback, and NumPy takes 32 bits with the stages' offsets added.
    (_SIZE, "seed"),
    (_POSITIVE, "epochs gpu_memory lora_alpha lr adam_eps layernorm_epsilon init_method_std"),
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
