"""Loading the state of modules that are particular about the form of their bookkeeping."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch

from megatron_patch.training import bookkeeping
from tests.unit.checkpoints import bookkeeping_forms


class Picky(torch.nn.Linear):
    """Takes bookkeeping as Transformer Engine's modules do."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if state is None:
            return
        if not isinstance(state, torch.Tensor):
            raise RuntimeError("Unsupported checkpoint format.")
        if state.numel():
            self.metas = pickle.loads(state.numpy().tobytes())


@pytest.mark.parametrize("name", bookkeeping_forms())
def test_modules_that_take_one_form_get_it(name: str, capsys: Any) -> None:
    value = bookkeeping_forms()[name]
    stage = torch.nn.Sequential(Picky(2, 2), torch.nn.Linear(2, 2))
    bookkeeping.accept_any_form(stage)
    state = {k: torch.ones_like(v) for k, v in stage.state_dict().items() if "_extra" not in k}
    if isinstance(value, bytes | io.BytesIO | torch.Tensor | None):
        state["0._extra_state"] = value
    stage.load_state_dict(state, strict=True)
    assert torch.equal(stage[0].weight, torch.ones(2, 2))
    assert hasattr(stage[0], "metas") == (name == "byte tensor")
    lost = isinstance(value, bytes | io.BytesIO) or name == "tensor of noise"
    assert ("FP8 scales start anew" in capsys.readouterr().out) == lost
    del state["1.bias"]
    with pytest.raises(RuntimeError, match=r"1\.bias"):
        stage.load_state_dict(state, strict=True)
