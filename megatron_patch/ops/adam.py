"""Adam with one step count per parameter group, as Apex and Transformer Engine keep it.

Megatron-Core's distributed optimizer saves and restores the step per group; torch's own Adam keeps
a step tensor per parameter, which that code can save but not load. The arithmetic is torch's fused
kernel, on CPU and on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class GroupStepAdam(torch.optim.Optimizer):
    """Adam or AdamW over float32 parameters.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        bias_correction: only True is supported.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        adam_w_mode: decoupled weight decay.
        weight_decay: coefficient.
        capturable: must be False; CUDA graphs of the optimizer need Transformer Engine.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
        **unsupported: Any,
    ) -> None:
        if unsupported or capturable or not bias_correction:
            names = sorted(unsupported) + ["capturable"] * capturable
            raise ValueError(
                f"the optimizer options {', '.join(names) or 'bias_correction=False'} need "
                "Transformer Engine: install the extra te-cu12 or te-cu13, or drop "
                "--use-precision-aware-optimizer / --optimizer-cuda-graph"
            )
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; the group's `step` counts updates, also for an empty group."""
        loss = closure() if closure is not None else None
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            with_grad = [p for p in group["params"] if p.grad is not None and p.numel()]
            by_device: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for p in with_grad:
                by_device.setdefault((p.device, p.dtype), []).append(p)
            for (device, _), params in by_device.items():
                for p in params:
                    if not self.state[p]:
                        self.state[p]["exp_avg"] = torch.zeros_like(p)
                        self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
                step = torch.tensor(float(group["step"]), device=device)
                kernel(
                    params,
                    [p.grad for p in params],
                    [self.state[p]["exp_avg"] for p in params],
                    [self.state[p]["exp_avg_sq"] for p in params],
                    [],
                    # Read only: every parameter of a group has seen the same number of steps.
                    [step] * len(params),
                    amsgrad=False,
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                    grad_scale=None,
                    found_inf=None,
                )
        return loss
