from __future__ import annotations

import megatron_model
import pytest
import torch
from check_family import check_family, check_windows, load, random_hf_model, resolve
from configs import QWEN3_MOE
from safetensors.torch import load_file

from megatron_patch.util import UserError


def test_contract(tmp_path):
    check_family("qwen3_moe", QWEN3_MOE, "qwen3_moe", tmp_path)


def test_gates_not_normalised_every_second_layer(tmp_path):
    config = QWEN3_MOE | {
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "num_experts_per_tok": 3,
    }
    check_family("qwen3_moe", config, "qwen3_moe_unnormalised", tmp_path)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("top_k", [2, 5])
def test_gates_of_the_router(tmp_path, normalised, top_k):
    """100 random tokens: the experts and gate values that transformers' router gives."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = QWEN3_MOE | {"norm_topk_prob": normalised, "num_experts_per_tok": top_k}
    args = resolve(config, tmp_path).args
    torch.manual_seed(0)
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**config))
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits, gates, experts = router(torch.randn(100, config["hidden_size"]))
    probs, chosen = topk_routing_with_score_function(
        logits,
        args["moe_router_topk"],
        use_pre_softmax=args["moe_router_pre_softmax"],
        score_function=args["moe_router_score_function"],
    )
    expected = torch.zeros_like(probs).scatter(1, experts, gates)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(chosen, expected > 0)


def test_balancing_loss_is_that_of_transformers_over_top_k(tmp_path):
    """What the note on the coefficient says of one layer."""
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    args = resolve(QWEN3_MOE, tmp_path).args
    assert args["moe_aux_loss_coeff"] == QWEN3_MOE["router_aux_loss_coef"]
    experts, top_k = args["num_experts"], args["moe_router_topk"]
    logits = torch.randn(100, experts, generator=torch.Generator().manual_seed(0))
    probs = logits.softmax(-1)
    counts = torch.zeros(100, experts).scatter(1, probs.topk(top_k).indices, 1).sum(0)
    ours = switch_load_balancing_loss_func(probs, counts, 100, top_k, experts, 1.0)
    theirs = load_balancing_loss_func((logits,), experts, top_k)
    torch.testing.assert_close(ours * top_k, theirs)


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_balancing_loss_reaches_the_router_exactly_once(tmp_path, coefficient):
    """The gradient of a model whose only loss is the balancing one, against transformers'."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    config = QWEN3_MOE | {"num_hidden_layers": 1, "mlp_only_layers": []}
    spec = resolve(config | {"router_aux_loss_coef": coefficient}, tmp_path)
    theirs = random_hf_model(tmp_path)
    theirs.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    tokens = torch.randint(1000, (2, 64), generator=torch.Generator().manual_seed(3))
    theirs(tokens, output_router_logits=True).aux_loss.backward()
    expected = theirs.model.layers[0].mlp.gate.weight.grad * coefficient / 2  # top-k
    with megatron_model.one_rank():
        ours = megatron_model.build(spec).train()
        load(ours, saved, spec)
        device = next(ours.parameters()).device
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device))
        with torch.compiler.set_stance("force_eager"):
            positions = torch.arange(64, device=device).expand(2, -1)
            (ours(tokens.to(device), positions, None) * 0).sum().backward()
        found = ours.decoder.layers[0].mlp.router.weight.grad.cpu()
    assert found.any() == bool(coefficient)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)


def test_one_expert_with_normalised_gates_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"norm_topk_prob.*num_experts_per_tok"):
        resolve(QWEN3_MOE | {"num_experts_per_tok": 1}, tmp_path)


def test_no_moe_layer_is_refused(tmp_path):
    with pytest.raises(UserError, match="no MoE layer"):
        resolve(QWEN3_MOE | {"mlp_only_layers": [0, 1, 2]}, tmp_path)


def test_both_spellings_of_the_expert_count(tmp_path):
    renamed = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert resolve(renamed, tmp_path).args == resolve(QWEN3_MOE, tmp_path).args
    with pytest.raises(UserError, match=r"num_local_experts.*num_experts"):
        resolve(QWEN3_MOE | {"num_local_experts": 16}, tmp_path)


@pytest.mark.slow
def test_windows(tmp_path):
    check_windows(QWEN3_MOE | {}, None, tmp_path)
