"""Which linear layers of a model get adapters, and what else fine-tuning with them takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_patch.convert import layout, rules
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron_patch.convert.rules import Rule
    from megatron_patch.models.family import ModelSpec
    from megatron_patch.training.args import Plan

#: What the flag's word for every linear layer stands for.
ALL = "all-linear"
#: Logical weights without an adapter, with the reason.
_EXCEPT = (
    (r"^(embedding|head)\.", "embedding and head"),
    (r"\.router\.", "routers"),
    (r"\.experts\.", "routed experts"),
    (r"^mtp\.", "layers for multi-token prediction, which transformers does not run"),
)


def targets(spec: ModelSpec, wanted: Sequence[str]) -> tuple[Rule, ...]:
    """The rules whose Hugging Face modules get adapters.

    Args:
        spec: the model.
        wanted: leaf names such as `q_proj`, or `all-linear`.

    Raises:
        UserError: a name that no linear layer of the model has, or parts of one fused layer.
    """
    linear = [r for r in rules.spec_rules(spec) if all(len(s) == 2 for s in r.shapes)]
    free = [r for r in linear if not any(re.search(p, r.name) for p, _ in _EXCEPT)]
    known = {leaf for rule in free for leaf in leaves(rule)}
    if ALL in wanted:
        return tuple(free)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UserError(
            f"--lora-target-modules {' '.join(unknown)}: this model's linear layers are "
            f"{', '.join(sorted(known))}; {ALL} takes them all (not "
            f"{', '.join(why for _, why in _EXCEPT)})"
        )
    return tuple(rule for rule in free if set(leaves(rule)) & set(wanted))


def leaves(rule: Rule) -> tuple[str, ...]:
    """Last names of the modules that a rule's tensors belong to."""
    return tuple(name.removesuffix(".weight").rpartition(".")[2] for name in rule.hf)


def install(stages: Sequence[Any], plan: Plan) -> None:
    """Freeze every weight and put adapters beside the wanted linear layers.

    Args:
        stages: this rank's model chunks.
        plan: with `--lora-rank`.
    """
    from megatron_patch.ops.lora import Adapter
    from megatron_patch.training.sft import named

    own, values = plan.own, plan.values
    assert own.lora_rank is not None and plan.model is not None
    wanted = own.lora_target_modules or [ALL]
    by_layer = {layer_of(rule): rule for rule in targets(plan.model, wanted)}
    for stage in stages:
        for parameter in stage.parameters():
            parameter.requires_grad_(False)
        found = {n.removesuffix(".weight") for n, _ in named(stage) if n.endswith(".weight")}
        for name in sorted(found & set(by_layer)):
            parent, _, leaf = _local(stage, name).rpartition(".")
            holder = stage.get_submodule(parent)
            adapter = Adapter(
                getattr(holder, leaf),
                by_layer[name],
                stage.config,
                rank=own.lora_rank,
                alpha=alpha(plan),
                dropout=own.lora_dropout,
                seed=values["seed"],
                only=None if ALL in wanted else frozenset(wanted),
            )
            holder.add_module(f"adapter_{leaf}", adapter)
        if stage.pre_process:
            # Recomputation wants an input with a gradient, and the frozen embedding gives none.
            stage.embedding.register_forward_hook(_with_gradient)


def _with_gradient(_module: Any, _inputs: Any, output: Any) -> Any:
    import torch

    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def layer_of(rule: Rule) -> str:
    """The Megatron module of a rule's weight, layers counted over all stages."""
    return layout.checkpoint_key(rule.name).removesuffix(".weight")


def _local(stage: Any, name: str) -> str:
    """The name that a module has in its own stage."""
    from megatron_patch.training.sft import layer_numbers

    place = re.match(r"decoder\.layers\.(\d+)\.", name)
    if place is None:
        return name
    here = {number: index for index, number in layer_numbers(stage).items()}
    return f"decoder.layers.{here[int(place[1])]}.{name[place.end() :]}"


def alpha(plan: Plan) -> float:
    """The numerator of the adapters' scale."""
    given = plan.own.lora_alpha
    return float(given if given is not None else 2 * (plan.own.lora_rank or 0))


def modules(spec: ModelSpec, wanted: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Hugging Face module, Megatron layer and part of every adapter of a model."""
    for rule in targets(spec, wanted):
        for leaf, name in zip(leaves(rule), rule.hf, strict=True):
            if ALL in wanted or leaf in wanted:
                yield name.removesuffix(".weight"), layer_of(rule), leaf
