"""From config.json to Megatron arguments, family by family."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path

import configs
import pytest
from check_family import resolve

from megatron_patch._compat import import_model_code
from megatron_patch.models import registry
from megatron_patch.models.family import ALIASES, ModelFamily, padded_vocab_size
from megatron_patch.models.hf_config import HFConfig
from megatron_patch.models.registry import families, get_family, load_config
from megatron_patch.models.rope import inv_freq
from megatron_patch.training.flags import number_problem
from megatron_patch.util import UserError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "configs"
TINY = {
    "qwen3": configs.QWEN3,
    "qwen3_moe": configs.QWEN3_MOE,
    "qwen2": configs.QWEN2,
    "llama": configs.LLAMA,
    "deepseek_v2": configs.DEEPSEEK_V2,
    "deepseek_v3": configs.DEEPSEEK_V3,
    "glm4_moe": configs.GLM4_MOE,
    "qwen3_next": configs.QWEN3_NEXT,
    "seed_oss": configs.SEED_OSS,
    "qwen2_moe": configs.QWEN2_MOE,
    "mixtral": configs.MIXTRAL,
    "mistral": configs.MISTRAL,
    "gpt_oss": configs.GPT_OSS,
    "qwen3_5": configs.QWEN3_5,
    "qwen3_5_moe": configs.QWEN3_5_MOE,
    "smollm3": configs.SMOLLM3,
}

#: Arguments with a number for each layer.
LISTS = ("linear_attention_freq", "moe_layer_freq", "no_rope_freq", "window_attn_skip_freq")

#: Published parameter counts; a tied output layer counts once.
PARAMETERS = {
    "codellama-7b": 6_738_546_688,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    # With MTP, without its copies of the embedding and the head and without FP8 scales:
    # 684_489_845_504 in the files.
    "deepseek-v3": 682_636_487_424,
    # 358_337_791_296 in the files, with the copies.
    "glm-4.5": 356_785_898_816,
    # 110_468_824_832 in the files, with the copies.
    "glm-4.5-air": 109_227_310_848,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "kimi-k2": 1_026_408_232_448,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    # 15_960_111_936 in the files, with a tensor of rotary frequencies a layer.
    "moonlight-16b-a3b": 15_960_110_208,
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    # With MTP (424_699_392 and 844_640_768), without the vision tower: 27_781_427_952 and
    # 35_951_822_704 in the files.
    "qwen3.5-27b": 27_320_697_856,
    "qwen3.5-35b-a3b": 35_505_251_456,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwq-32b": 32_763_876_352,
    "smollm3-3b": 3_075_098_624,
    "smollm2-135m": 134_515_008,
    "yi-34b": 34_388_917_248,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_real_config_gives_the_published_parameter_count(name):
    hf = load_config(FIXTURES / f"{name}.json")
    spec = get_family(hf.model_type).resolve(hf)
    shapes = [s for rule in get_family(spec.family).rules(spec) for s in rule.shapes]
    assert sum(math.prod(shape) for shape in shapes) == PARAMETERS[name]
    assert json.loads(json.dumps(spec.args)) == spec.args


BAD = (
    *(None, True, False, -1, 0, 3, 10**30, 10**400, 0.5, 1.5, -0.5, math.nan, math.inf, "", "x"),
    *([], [1], ["a"], [None], {}, {"a": 1}),
)


@pytest.mark.parametrize("family", TINY)
def test_every_field_with_every_bad_value(family):
    """A message that names the file, or a model of finite sizes in their ranges; no traceback."""

    def fields(config, above=()):
        for key, value in config.items():
            yield (*above, key)
            if isinstance(value, dict):
                yield from fields(value, (*above, key))

    def changed(config, path, value):
        inner = value if len(path) == 1 else changed(config[path[0]], path[1:], value)
        return {**config, path[0]: inner}

    config, found = TINY[family], get_family(family)
    more = [(k,) for k in ("architectures", "eos_token_id", "rope_scaling", "layer_types")]
    for path in [*fields(config), *more]:
        for bad in BAD:
            try:
                spec = found.resolve(HFConfig(changed(config, path, bad), Path("config.json")))
            except UserError as error:
                message = str(error)
                assert len(message) < 1000, (path, bad)
                assert "config.json" in message or path == ("model_type",), (path, bad)
                continue
            assert all(number_problem(d, v) is None for d, v in spec.args.items()), (path, bad)
            assert all(map(math.isfinite, inv_freq(spec.rope))), (path, bad)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model_type": "qwen3", "vocab_size": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"model_type": "\xff"}', "utf-8"),
        (b'{"a": 1, "a": 2}', "'a' stands more than once, as 1 and 2"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' stands more than once"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "a JSON list, not an object"),
        (b"", "not valid JSON"),
    ],
)
def test_a_file_that_is_none(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        load_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value) and len(str(caught.value)) < 400


def test_every_fixture_is_counted():
    assert {path.stem for path in FIXTURES.glob("*.json")} == set(PARAMETERS)


def test_real_details():
    def args(name):
        hf = load_config(FIXTURES / f"{name}.json")
        return get_family(hf.model_type).resolve(hf)

    llama, moe, smol = args("llama-3.2-1b"), args("qwen3-30b-a3b"), args("smollm2-135m")
    assert (llama.rope.type, llama.rope.factor, llama.rope.theta) == ("llama3", 32.0, 5e5)
    assert llama.args["use_rope_scaling"] is False and llama.args["rotary_base"] == 500000
    assert moe.args["moe_layer_freq"] == 1 and moe.args["moe_router_pre_softmax"] is False
    assert moe.args["moe_aux_loss_coeff"] == 0.001 and moe.args["kv_channels"] == 128
    assert smol.args["init_method_std"] == 0.041666666666666664 and smol.tied
    assert args("codellama-7b").padded_vocab_size == 32128
    assert args("qwen2.5-7b").args["add_qkv_bias"] is True


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 32000, 32016, 128256, 151643, 151936, 262145])
def test_one_padded_vocabulary_for_every_tp(vocab):
    padded = padded_vocab_size(vocab)
    assert vocab <= padded < vocab + 128
    for tp in (1, 2, 4, 8, 16):
        assert padded % tp == 0 and padded // tp % 8 == 0


@pytest.fixture(scope="module")
def parser():
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser


GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_arguments_are_megatrons_own(parser, golden):
    """Every dest exists upstream and takes a value of this type."""
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, []).append(action)
    for dest, value in json.loads(golden.read_text()).items():
        action = actions[dest][0]
        if action.nargs == 0:
            assert isinstance(value, bool), dest
        elif dest in LISTS:
            assert action.type(str(value).replace(" ", "")) == value
        elif dest == "window_size":
            assert all(type(number) is int for number in action.type(value))
        else:
            fits = value is action.default is None or type(value) is action.type
            assert fits, (dest, value, action.type)
            assert action.choices is None or value in action.choices, (dest, value)


@pytest.mark.parametrize("name", TINY)
def test_every_field_that_transformers_reads_is_accounted_for(name, tmp_path):
    """Mapped, inert or refused: a field that a new transformers reads fails here by name."""
    known = _accounted_for(name, tmp_path)
    for kind in ("modeling", "configuration"):
        import_model_code(name)  # as what runs the model later in this process needs it
        module = importlib.import_module(f"transformers.models.{name}.{kind}_{name}")
        unknown = _config_reads(module) - known
        assert not unknown, f"{module.__name__} reads {sorted(unknown)}"


def _accounted_for(name: str, tmp_path: Path) -> set[str]:
    family = get_family(name)
    seen: list[frozenset[str]] = []
    original = ModelFamily._refuse_unknown

    def spy(self, hf):
        seen.append(hf.keys_read)
        return original(self, hf)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelFamily, "_refuse_unknown", spy)
        resolve(TINY[name], tmp_path)
    return set(seen[0]) | {key for key, _ in family.inert} | {key for key, _ in family.aliases}


def _config_reads(module) -> set[str]:
    """Attributes read from a config object, and the fields of a config class."""
    tree = ast.parse(inspect.getsource(module))
    # A language model beside a vision tower: the tower's fields are not ours.
    inner = any(isinstance(n, ast.ClassDef) and "Text" in n.name for n in tree.body)
    tree.body = [n for n in tree.body if not inner or "Vision" not in getattr(n, "name", "")]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config"):
            found.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "getattr"
            and ast.unparse(node.args[0]) in ("config", "self.config")
            and isinstance(node.args[1], ast.Constant)
        ):
            found.add(node.args[1].value)
        elif isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            found |= {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    return found - {"per_layer_config", "text_config"}


@pytest.mark.parametrize("name", TINY)
def test_defaults_are_those_of_the_configuration_class(name):
    import transformers

    module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    classes = [getattr(transformers, n) for n in module.__all__]
    config_class = next((c for c in classes if c.__name__.endswith("TextConfig")), classes[0])
    instance = config_class()
    for key, value in get_family(name).hf_defaults:
        found = getattr(instance, key) if key in vars(instance) else instance.rope_parameters[key]
        assert found == value and type(found) is type(value), key


@pytest.mark.parametrize("name", TINY)
def test_an_absent_optional_key_is_its_default_and_said(name, tmp_path):
    config = {k: v for k, v in TINY[name].items() if k != "tie_word_embeddings"}
    spec = resolve(config, tmp_path)
    assert spec.tied is dict(get_family(name).hf_defaults)["tie_word_embeddings"]
    assert any("tie_word_embeddings" in note for note in spec.notes)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("auto_map", {"AutoModelForCausalLM": "modeling_other.Other"}),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("architectures", ["RewardForSequenceClassification"]),
        ("vocab_size", "many"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 0),
        ("hidden_size", None),
        ("num_key_value_heads", 3),
        ("tie_word_embeddings", 1),
        ("rms_norm_eps", "small"),
    ],
)
def test_refusals_name_file_key_and_value(name, key, value, tmp_path):
    with pytest.raises(UserError) as caught:
        resolve(TINY[name] | {key: value}, tmp_path)
    message = str(caught.value)
    assert "config.json" in message and key in message
    shown = value[0] if isinstance(value, list) else "missing" if value is None else str(value)
    assert shown in message


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3", "attention_bias", True),
        ("qwen3", "use_sliding_window", True),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("qwen3", "layer_types", ["full_attention"]),
        ("qwen3_moe", "attention_bias", True),
        ("qwen3_moe", "use_sliding_window", True),
        ("qwen3_moe", "mlp_only_layers", [3]),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "num_experts_per_tok", 9),
        ("qwen2", "dual_chunk_attention_config", {"chunk_size": 8}),
        ("qwen2", "use_mrope", True),
        ("qwen2", "use_sliding_window", 0),
        ("llama", "pretraining_tp", 2),
        ("llama", "pretraining_tp", True),
        ("llama", "rope_interleaved", True),
    ],
)
def test_unsupported_features_are_refused_by_name(name, key, value, tmp_path):
    with pytest.raises(UserError, match=key):
        resolve(TINY[name] | {key: value}, tmp_path)


def test_unknown_model_type_lists_what_there_is(tmp_path):
    with pytest.raises(UserError, match=r"'gpt5'.*llama, mistral, mixtral, qwen2, "):
        get_family("gpt5")
    assert set(families()) == {*TINY, *(alias for alias, _ in ALIASES)}
    for shared in ("blocks", "rope", "registry", "", "../llama", "__init__"):
        with pytest.raises(UserError):
            get_family(shared)


@pytest.mark.parametrize("name", families())
def test_a_family_is_one_small_file_of_its_own_name(name):
    name = dict(ALIASES).get(name, name)
    assert get_family(name).name == name
    path = Path(registry.__file__).with_name(f"{name}.py")
    assert len(path.read_text().splitlines()) <= 150


def test_unreadable_configs(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        load_config(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no config\.json"):
        load_config(tmp_path)
    file = tmp_path / "config.json"
    for content, words in (("{", "not valid JSON"), ("[1]", "list"), ("{}", "model_type")):
        file.write_text(content)
        with pytest.raises(UserError, match=words):
            load_config(tmp_path).model_type  # noqa: B018


def test_a_config_cannot_be_changed():
    hf = load_config(FIXTURES / "qwen3-8b.json")
    with pytest.raises(TypeError):
        hf.data["vocab_size"] = 1


def test_an_outside_family_is_found_by_entry_point(monkeypatch):
    class Entry:
        name = "foo"

        def load(self):
            return get_family("qwen3")

    original = registry.metadata.entry_points

    def entry_points(group):
        assert group == "megatron_patch.families"
        return [*original(group=group), Entry()]

    monkeypatch.setattr(registry.metadata, "entry_points", entry_points)
    assert "foo" in families() and get_family("foo").name == "qwen3"


def test_resolving_imports_nothing_heavy():
    code = (
        "import sys; from megatron_patch.models.registry import *;"
        f"hf = load_config({str(FIXTURES / 'qwen3-30b-a3b.json')!r});"
        "spec = get_family(hf.model_type).resolve(hf); get_family(spec.family).rules(spec);"
        "print([m for m in ('torch', 'megatron', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
