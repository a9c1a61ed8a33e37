"""Norms, linear layers and the specs built of them: values, and Transformer Engine's key names."""

from __future__ import annotations

import re

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from tests.models.megatron_model import one_rank


@pytest.fixture(scope="module", autouse=True)
def world():
    with one_rank(), torch.random.fork_rng():
        yield


def config(kind=TransformerConfig, **more):
    return kind(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "params_dtype": torch.float64,
            "pipeline_dtype": torch.float64,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-3,
            **more,
        }
    )


def normed(x, weight, bias, settings):
    """Both norms written out."""
    if settings.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + settings.layernorm_epsilon).sqrt()
    x = x * (weight + 1 if settings.layernorm_zero_centered_gamma else weight)
    return x if bias is None else x + bias


VARIANTS = [
    pytest.param({"normalization": kind, "layernorm_zero_centered_gamma": zero}, id=name)
    for kind, zero, name in (
        ("RMSNorm", False, "rms"),
        ("RMSNorm", True, "rms-zero-centered"),
        ("LayerNorm", False, "layer"),
        ("LayerNorm", True, "layer-zero-centered"),
    )
]


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def same_gradients(ours, theirs, leaves):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    factor = torch.randn_like(theirs)
    a = torch.autograd.grad((ours * factor).sum(), leaves)
    b = torch.autograd.grad((theirs * factor).sum(), leaves)
    for x, y in zip(a, b, strict=True):
        assert x.abs().max() > 0
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@pytest.mark.parametrize("settings", VARIANTS)
def test_norm(settings):
    from megatron_patch.ops.linear import Norm

    settings = config(**settings)
    norm = Norm(settings, 32, eps=1e-3)
    x = random(5, 2, 32)
    torch.testing.assert_close(  # a fresh norm only normalizes
        norm(x), normed(x, norm.weight.detach(), None, settings), rtol=0, atol=1e-12
    )
    one = 0.0 if settings.layernorm_zero_centered_gamma else 1.0
    assert torch.equal(norm.weight, torch.full_like(norm.weight, one))
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    names = {"weight", "bias"} if settings.normalization == "LayerNorm" else {"weight"}
    assert set(norm.state_dict()) == names
    same_gradients(norm(x), normed(x, norm.weight, norm.bias, settings), [x, *norm.parameters()])


@pytest.mark.parametrize("parallel", [False, True])
def test_gradients_of_norms_are_summed_under_sequence_parallelism(parallel):
    from megatron_patch.ops.linear import Norm, ReplicatedLinear

    settings = config(tensor_model_parallel_size=2 if parallel else 1, sequence_parallel=parallel)
    linear = ReplicatedLinear(
        4,
        3,
        parallel_mode="duplicated",
        config=settings,
        init_method=torch.nn.init.normal_,
        bias=True,
        skip_bias_add=False,
    )
    for p in (*Norm(settings, 8).parameters(), *linear.parameters()):
        assert p.sequence_parallel is parallel


@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("late_bias", [False, True])
def test_norm_and_linear_in_one(settings, late_bias):
    from megatron_patch.ops.linear import NormColumnParallelLinear

    settings = config(**settings)
    layer = NormColumnParallelLinear(
        32,
        12,
        config=settings,
        init_method=torch.nn.init.normal_,
        bias=True,
        gather_output=False,
        skip_bias_add=late_bias,
    )
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    x = random(5, 2, 32)
    out, bias = layer(x)
    expected = normed(x, layer.layer_norm_weight, layer.layer_norm_bias, settings) @ layer.weight.T
    if late_bias:
        assert bias is layer.bias
        leaves = [p for p in layer.parameters() if p is not layer.bias]
    else:
        assert bias is None
        expected = expected + layer.bias
        leaves = list(layer.parameters())
    same_gradients(out, expected, [x, *leaves])


@pytest.mark.parametrize("late_bias", [False, True])
def test_replicated_linear(late_bias):
    from megatron_patch.ops.linear import ReplicatedLinear

    layer = ReplicatedLinear(
        8,
        3,
        parallel_mode="duplicated",
        config=config(),
        init_method=torch.nn.init.normal_,
        bias=True,
        skip_bias_add=late_bias,
    )
    with torch.no_grad():
        layer.bias.normal_()
    x = random(5, 2, 8)
    out, bias = layer(x)
    assert (bias is layer.bias) == late_bias
    expected = x @ layer.weight.T + (0 if late_bias else layer.bias)
    same_gradients(out, expected, [x, layer.weight])


def test_refusals():
    from megatron_patch.ops.backend import torch_backend
    from megatron_patch.ops.linear import Norm, ReplicatedLinear

    common = {"init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": False}
    for wrong in ({"parallel_mode": "column"}, {"parallel_mode": None, "is_expert": True}):
        with pytest.raises(ValueError, match="use the column or row parallel one"):
            ReplicatedLinear(8, 3, config=config(), **common, **wrong)
    settings = config()
    settings.normalization = "L2Norm"
    with pytest.raises(ValueError, match="--normalization L2Norm: RMSNorm and LayerNorm"):
        Norm(settings, 8)
    with pytest.raises(ValueError, match="--transformer-impl local: leave the flag out"):
        torch_backend("local")


# --- key names --------------------------------------------------------------------------------

# Facts about checkpoints written with Transformer Engine, by Megatron-Core's own spec.
ATTENTION = {
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
}
MLP = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
QK_NORM = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
BIASES = {
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_qkv.layer_norm_bias",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc1.layer_norm_bias",
    "mlp.linear_fc2.bias",
}
MOE = {
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
}
# With low-rank queries. The norm before the down projections has no projection to belong to: two
# share it.
LATENT = {
    "input_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
}
DELTA_NET = {
    "self_attention.A_log",
    "self_attention.conv1d.weight",
    "self_attention.dt_bias",
    "self_attention.in_proj.layer_norm_weight",
    "self_attention.in_proj.weight",
    "self_attention.out_norm.weight",
    "self_attention.out_proj.weight",
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_token_dispatcher_type": "alltoall",
}
LATENT_SIZES = {
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "qk_layernorm": True,
    "rope_type": "rope",
}
DELTA_SIZES = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def keys(settings):
    """Checkpoint keys of the decoder's layers, as a sharded state dict gives them."""
    from megatron.core import mpu
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    if settings.experimental_attention_variant:
        spec = variants.get_transformer_block_with_experimental_attention_variant_spec(settings)
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(settings, use_transformer_engine=True)
    model = GPTModel(
        settings,
        spec,
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    state = model.sharded_state_dict(
        metadata={
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
            "singleton_local_shards": False,
        }
    )
    found = {leaf.key for leaf in nested_values(state) if hasattr(leaf, "data")}
    found = {key for key in found if not key.endswith("_extra_state")}
    assert "decoder.final_layernorm.weight" in found
    # Layers of one kind share a key and are stacked along an axis in front.
    rows = [re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(.+)", key) for key in found]
    return [
        {row[2] for row in rows if row and row[1] in (None, str(i))}
        for i in range(settings.num_layers)
    ]


HETEROGENEOUS = {"moe_layer_freq": [0, 1], **EXPERTS}


@pytest.mark.parametrize(
    ("kind", "settings", "first", "second"),
    [
        (TransformerConfig, {"add_bias_linear": False}, ATTENTION | MLP, ATTENTION | MLP),
        (
            TransformerConfig,
            {"normalization": "LayerNorm", "qk_layernorm": True},
            {n.replace("weight", "bias") for n in QK_NORM} | QK_NORM | ATTENTION | MLP | BIASES,
            {n.replace("weight", "bias") for n in QK_NORM} | QK_NORM | ATTENTION | MLP | BIASES,
        ),
        (
            TransformerConfig,
            {"add_bias_linear": False, "qk_layernorm": True, **HETEROGENEOUS},
            ATTENTION | QK_NORM | MLP,
            ATTENTION | QK_NORM | MOE,
        ),
        (
            MLATransformerConfig,
            {"add_bias_linear": False, **HETEROGENEOUS, **LATENT_SIZES},
            LATENT | MLP,
            LATENT | MOE,
        ),
        (
            TransformerConfig,
            {"add_bias_linear": False, "qk_layernorm": True, **DELTA_SIZES},
            DELTA_NET | MLP,
            ATTENTION | QK_NORM | MLP,
        ),
    ],
    ids=["dense", "dense-biases", "moe", "latent", "delta-net"],
)
def test_names_are_transformer_engines(kind, settings, first, second):
    found = keys(config(kind, params_dtype=torch.float32, **settings))
    assert found[0] == first
    assert found[1] == second
