"""From resolved arguments to the model configuration that Megatron-Core builds from."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_patch import _compat

if TYPE_CHECKING:
    from megatron_patch.convert.plan import Source
    from megatron_patch.models.family import ModelSpec


def mask_padded_vocab(model: Any, true_vocab_size: int) -> None:
    """Keep the rows that only pad the vocabulary out of softmax and decoding.

    Registers a hook on the output layer that sets the logits of padded columns to the smallest
    finite value, on the rank that holds them. Their gradient is zero, so their weights never move.
    Nothing is registered where the vocabulary needs no padding.

    Args:
        model: a `GPTModel` stage.
        true_vocab_size: rows of the embedding in the HF checkpoint.
    """
    layer = getattr(model, "output_layer", None)
    if layer is None or model.vocab_size == true_vocab_size:
        return
    per_rank = layer.output_size_per_partition
    first_padded = true_vocab_size - layer.tp_group.rank() * per_rank

    def hook(_module: Any, _args: Any, given: dict[str, Any], output: Any) -> Any:
        import torch

        if given.get("labels") is not None:
            return output  # losses (ops/linear_cross_entropy.py), whose softmax knows the padding
        logits, bias = output
        start = true_vocab_size if logits.shape[-1] != per_rank else first_padded
        if start >= logits.shape[-1]:
            return output
        # torch.cat would copy 1/8 GiB a step; a mask of one row broadcasts.
        column = torch.arange(logits.shape[-1], device=logits.device)
        return logits.masked_fill(column >= start, torch.finfo(logits.dtype).min), bias

    layer.register_forward_hook(hook, with_kwargs=True)


def _say_who_shares(stage: Any) -> None:
    """Correct what parameters say of the ranks that share their gradients.

    Every TP rank has sinks of its own, which the norm of the gradients asks for; neither upstream's
    nor Transformer Engine's attention says so of ``softmax_offset``. The bias of an expert's last
    layer is shared by the ranks that share the expert, and by no others; upstream's linear layer
    says that sequence parallelism splits its gradient over the TP ranks, which then add theirs: the
    same once more, or those of other experts.
    """
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    for name, parameter in stage.named_parameters():
        if name.endswith(".softmax_offset") and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        if ".mlp.experts." in name and getattr(parameter, "sequence_parallel", False):
            parameter.sequence_parallel = False


def _add_details(stage: Any, spec: ModelSpec) -> None:
    """What Megatron's arguments cannot say of a model."""
    if spec.latent_norm_epsilon is not None:
        from megatron_patch.models.modules.latent import set_latent_norms

        set_latent_norms(stage, spec.latent_norm_epsilon)
    if spec.groups_by_best is not None:
        from megatron_patch.models.modules.routing import choose_groups_by_best

        choose_groups_by_best(stage, spec.groups_by_best)


def _say(text: str) -> None:
    """Print on the first rank of a pipeline stage."""
    from megatron.core import parallel_state

    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    if ranks == (0, 0):
        size = parallel_state.get_pipeline_model_parallel_world_size()
        stage = f"stage {parallel_state.get_pipeline_model_parallel_rank()}, " if size > 1 else ""
        print(f"> {stage}{text}", flush=True)


def model_config(
    args: Namespace,
    spec: ModelSpec | None,
    *,
    linear_cross_entropy: bool = False,
    fused_kernels: bool = False,
    weights: Source | None = None,
    adjust: Callable[[list[Any]], None] | None = None,
    report: bool = False,
) -> Any:
    """The `GPTModelConfig` for `args`, with this library's hooks.

    Args:
        args: validated Megatron arguments.
        spec: the family's resolution of `config.json`; None for a model given by Megatron flags.
        linear_cross_entropy: make output layer and loss one operation.
        fused_kernels: this library's kernels where they cover what a layer does.
        weights: Hugging Face files to fill the stages from.
        adjust: changes the stages as the entry point needs them, last.
        report: print which kernel computes the attention of each kind of layer, once it is known.

    Returns:
        A `megatron.training.models.gpt.GPTModelConfig`. Hooks run on every stage before it is
        wrapped for data parallelism.
    """
    from megatron.training.argument_utils import gpt_config_from_args

    config = gpt_config_from_args(args)
    if spec is not None and any(layer.attention == "mla" for layer in spec.layers):
        from megatron_patch.models.modules.latent import layer_spec

        config.transformer_layer_spec = layer_spec
    delta = spec is not None and any(layer.attention == "delta" for layer in spec.layers)
    if delta:
        from megatron_patch.models.modules.gated_delta import layer_spec

        config.transformer_layer_spec = layer_spec

    def before_wrapping(stages: list[Any]) -> list[Any]:
        if delta:
            from megatron_patch.models.modules.gated_delta import VARIANT

            config.transformer.experimental_attention_variant = VARIANT
        from megatron_patch.models.rope import apply_rope
        from megatron_patch.training import figures, startup
        from megatron_patch.training.bookkeeping import accept_any_form
        from megatron_patch.training.mtp import weigh_by_main_targets

        startup.mark("ranks and model")
        _compat.compile_again()
        for stage in stages:
            if spec is not None:
                apply_rope(stage, spec.rope)
                mask_padded_vocab(stage, spec.true_vocab_size)
                _add_details(stage, spec)
            if delta:
                from megatron_patch.models.modules.gated_delta import compute_without_kernels

                compute_without_kernels(stage)
            weigh_by_main_targets(stage)
            _say_who_shares(stage)
            accept_any_form(stage)
            stage.fused_loss = None
            if linear_cross_entropy:
                from megatron_patch.ops import linear_cross_entropy as fused

                fused.install(
                    stage, spec.true_vocab_size if spec is not None else args.padded_vocab_size
                )
            if fused_kernels:
                from megatron_patch.ops import qkv, swiglu

                qkv.install(stage)
                swiglu.install(stage)
            if figures.EXPERTS is not None:
                figures.EXPERTS.install(stage)
        if report:
            from megatron_patch.ops import attention_backend

            attention_backend.watch(stages, _say)
        if weights is not None:
            from megatron_patch.convert.load import load

            load(stages, weights)
        if adjust is not None:
            adjust(stages)
        return stages

    config.pre_wrap_hooks = [*config.pre_wrap_hooks, before_wrapping]
    return config
