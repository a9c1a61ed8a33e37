"""Which linear layers of a model get adapters, and what else fine-tuning with them takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_patch.convert import layout, rules
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron_patch.convert.rules import Rule
    from megatron_patch.models.family import ModelSpec
    from megatron_patch.training.args import Plan

#: The flag's word for every linear layer, and that for all routed experts.
ALL, EXPERTS = "all-linear", "experts"
#: Logical weights without an adapter, with the reason.
_EXCEPT = (
    (r"^(embedding|head)\.", "embedding and head"),
    (r"\.router\.", "routers"),
    (r"\.experts\.", f"routed experts, which are called {EXPERTS}"),
    (r"^mtp\.", "layers for multi-token prediction, which transformers does not run"),
)


def targets(spec: ModelSpec, wanted: Sequence[str]) -> tuple[Rule, ...]:
    """The rules whose Hugging Face modules get adapters.

    Args:
        spec: the model.
        wanted: leaf names such as `q_proj`, `all-linear`, `experts`.

    Raises:
        UserError: a name that no linear layer of the model has, or parts of one fused layer.
    """
    linear = [r for r in rules.spec_rules(spec) if all(len(s) == 2 for s in r.shapes)]
    free = [r for r in linear if not any(re.search(p, r.name) for p, _ in _EXCEPT)]
    routed = [r for r in linear if _ROUTED.fullmatch(r.name)] if EXPERTS in wanted else []
    if EXPERTS in wanted and not routed:
        raise UserError(f"--lora-target-modules {EXPERTS}: this model has no routed experts")
    known = {leaf for rule in free for leaf in leaves(rule)}
    if ALL in wanted:
        return (*free, *routed)
    unknown = [name for name in wanted if name not in known | {EXPERTS}]
    if unknown:
        raise UserError(
            f"--lora-target-modules {' '.join(unknown)}: this model's linear layers are "
            f"{', '.join(sorted(known))}; {ALL} takes them all (not "
            f"{', '.join(why for _, why in _EXCEPT)})"
        )
    return (*(rule for rule in free if set(leaves(rule)) & set(wanted)), *routed)


#: Layer, expert and part of an expert's weight in the decoder.
_ROUTED = re.compile(r"layers\.(\d+)\.moe\.experts\.(\d+)\.(gate_up|down)\.weight")


def leaves(rule: Rule) -> tuple[str, ...]:
    """Last names of the modules that a rule's tensors belong to."""
    return tuple(name.removesuffix(".weight").rpartition(".")[2] for name in rule.hf)


def install(stages: Sequence[Any], plan: Plan) -> None:
    """Freeze every weight and put adapters beside the wanted linear layers.

    Args:
        stages: this rank's model chunks.
        plan: with `--lora-rank`.
    """
    from megatron_patch.ops.lora import Adapter, ExpertAdapter
    from megatron_patch.training.sft import layer_numbers, named

    own, values = plan.own, plan.values
    assert own.lora_rank is not None and plan.model is not None
    wanted = own.lora_target_modules or [ALL]
    chosen = targets(plan.model, wanted)
    by_layer = {layer_of(rule): rule for rule in chosen if not _ROUTED.fullmatch(rule.name)}
    routed = {place.layer: place.parent for place in places(plan.model, wanted) if place.a}
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
        for index, number in layer_numbers(stage).items():
            module = routed.get(f"decoder.layers.{number}.mlp.{EXPERTS}")
            if module is None:
                continue
            mlp = stage.decoder.layers[index].mlp
            beside = ExpertAdapter(
                mlp.experts, module, rank=own.lora_rank, alpha=alpha(plan), seed=values["seed"]
            )
            # Not below the experts, whose checkpoints upstream writes in a way of their own.
            mlp.add_module(f"adapter_{EXPERTS}", beside)
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


@dataclass(frozen=True)
class Place:
    """Where the adapter of one Hugging Face weight stands in a checkpoint.

    Attributes:
        module: Hugging Face module.
        layer: Megatron layer.
        part: Which of the layer's adapters.
        a: Index of its A in the tensor there, of an expert.
        b: Index of its B.
    """

    module: str
    layer: str
    part: str
    a: tuple[int, ...] = ()
    b: tuple[int, ...] = ()

    @property
    def parent(self) -> str:
        """Of an expert, the module that holds all of them in transformers 5."""
        above = self.module.rpartition(f".{EXPERTS}.")[0]
        # Mixtral's files have the older name.
        return f"{above.replace('block_sparse_moe', 'mlp')}.{EXPERTS}"


def places(spec: ModelSpec, wanted: Sequence[str]) -> Iterator[Place]:
    """Every adapter of a model."""
    for rule in targets(spec, wanted):
        routed = _ROUTED.fullmatch(rule.name)
        for number, (leaf, name) in enumerate(zip(leaves(rule), rule.hf, strict=True)):
            module = name.removesuffix(".weight")
            if routed is not None:
                layer, expert, part = routed.groups()
                b = (int(expert), number) if part == "gate_up" else (int(expert),)
                yield Place(
                    module, f"decoder.layers.{layer}.mlp.{EXPERTS}", part, (int(expert),), b
                )
            elif ALL in wanted or leaf in wanted:
                yield Place(module, layer_of(rule), leaf)
