"""Adapters of routed experts: one grouped product gives what an expert after the other gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_patch.convert import one_rank


class Linear(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


class Grouped(torch.nn.Module):
    """In the shape of Transformer Engine's `GroupedLinear`."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.count = len(weights)
        for number, weight in enumerate(weights):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(weight))

    def forward(self, x: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        weights = [self.get_parameter(f"weight{number}") for number in range(self.count)]
        parts = zip(x.split(counts), weights, strict=True)
        return torch.cat([F.linear(x, w) for x, w in parts]), None


def test_grouped_is_sequential() -> None:
    generator = torch.Generator().manual_seed(1)
    fc1 = torch.randn(3, 16, 6, generator=generator)
    fc2 = torch.randn(3, 6, 8, generator=generator)
    x = torch.randn(9, 6, generator=generator)
    counts = [4, 0, 5]
    with one_rank.one_rank():
        from megatron_patch.ops.lora import ExpertAdapter

        def experts(grouped: bool) -> Any:
            module = torch.nn.Module()
            module.num_local_experts = 3
            if grouped:
                module.linear_fc1, module.linear_fc2 = Grouped(fc1), Grouped(fc2)
                return module
            module.local_experts = torch.nn.ModuleList()
            for one, two in zip(fc1, fc2, strict=True):
                expert = torch.nn.Module()
                expert.linear_fc1, expert.linear_fc2 = Linear(one), Linear(two)
                module.local_experts.append(expert)
            return module

        both = [experts(True), experts(False)]
        adapters = [ExpertAdapter(e, "experts", rank=2, alpha=4, seed=1) for e in both]
        for parameter in adapters[0].parameters():
            parameter.data += 0.1
        adapters[1].load_state_dict(adapters[0].state_dict())
        one = both[0].linear_fc1(x, counts)[0]
        two = torch.cat(
            [
                e.linear_fc1(p)[0]
                for e, p in zip(both[1].local_experts, x.split(counts), strict=True)
            ]
        )
        plain = torch.cat([F.linear(p, w) for p, w in zip(x.split(counts), fc1, strict=True)])
        torch.testing.assert_close(one, two)
        assert (one - plain).abs().max() > 0.1
        for out in (one, two):
            out.square().sum().backward()
        for name, parameter in adapters[0].named_parameters():
            other = adapters[1].get_parameter(name)
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, other.grad)
