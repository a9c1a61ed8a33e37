"""Laws 3, 5, 6 and 7 and the habits, read off the syntax trees."""

from __future__ import annotations

import ast
import re

from megatron_patch.models import registry as families
from tests.meta.tree import ROOT, dotted, sources, tracked

#: Names whose value is a size of a model.
SIZES = re.compile(
    r"^(hidden_size|intermediate_size|ffn_hidden_size|moe_(ffn|intermediate)\w*size|num_layers|"
    r"num_hidden_layers|num_attention_heads|num_query_groups|num_key_value_heads|kv_channels|"
    r"head_dim|vocab_size|padded_vocab_size|num_(local_)?experts|num_moe_experts|"
    r"max_position_embeddings|q_lora_rank|kv_lora_rank)$"
)


def test_law6_only_compat_reads_upstream_versions(law):
    breaches = []
    for path, tree in sources():
        if path.name == "_compat.py":
            continue
        for node in ast.walk(tree):
            name = dotted(node.func) if isinstance(node, ast.Call) else ""
            last = name.rpartition(".")[2]
            reads = (
                name in ("metadata.version", "importlib.metadata.version", "version")
                or last in ("get_te_version", "get_torch_version", "is_te_min_version")
                or last == "is_torch_min_version"
                or (
                    isinstance(node, ast.Attribute)
                    and node.attr == "__version__"
                    and dotted(node.value) != "megatron_patch"
                )
                or (isinstance(node, ast.Attribute) and dotted(node).startswith("torch.version."))
            )
            if reads:
                breaches.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    law(breaches, "ask megatron_patch._compat")


MUTABLE_CALLS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque"}


def test_law3_tables_are_immutable(law):
    """In the rooms of weight rules and patches, no module or class holds a mutable container."""
    breaches = []
    for path, tree in sources():
        if len(path.parts) < 3 or path.parts[1] not in ("models", "convert", "patches"):
            continue
        scopes = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
        for statement in (s for scope in scopes for s in scope.body):
            if not isinstance(statement, ast.Assign | ast.AnnAssign):
                continue
            targets = getattr(statement, "targets", None) or [statement.target]
            names = [dotted(target) for target in targets]
            value = statement.value
            mutable = isinstance(
                value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
            ) or (isinstance(value, ast.Call) and dotted(value.func) in MUTABLE_CALLS)
            # A private lower-case name is a cache or a register, and says so.
            table = any(not name.startswith(("__", "_")) or name.isupper() for name in names)
            if mutable and table:
                breaches.append(f"{path}:{statement.lineno}: {', '.join(names)}")
    law(breaches, "make these a tuple, a frozen dataclass or a MappingProxyType")


def test_law5_no_size_of_a_model_in_python(law):
    breaches = []
    for path, tree in sources():
        if path.name in ("demo.py",):  # the demo's own tiny model
            continue
        for node in ast.walk(tree):
            pairs: list[tuple[str, ast.AST | None]] = []
            if isinstance(node, ast.keyword) and node.arg:
                pairs.append((node.arg, node.value))
            elif isinstance(node, ast.Dict):
                keys = [k.value if isinstance(k, ast.Constant) else "" for k in node.keys]
                pairs += [(str(k), v) for k, v in zip(keys, node.values, strict=True)]
            for name, value in pairs:
                number = isinstance(value, ast.Constant) and isinstance(value.value, int)
                if number and value.value not in (0, 1, True, False) and SIZES.match(name):
                    breaches.append(f"{path}:{value.lineno}: {name}={value.value}")
    law(breaches, "sizes come from config.json")


def test_law5_no_size_of_a_model_in_bash(law):
    flag = re.compile(
        r"--(hidden-size|num-layers|num-attention-heads|num-query-groups|ffn-hidden-size|"
        r"kv-channels|vocab-size|num-experts|moe-ffn-hidden-size|max-position-embeddings|"
        r"q-lora-rank|kv-lora-rank|rotary-base|padded-vocab-size)\b"
    )
    variable = re.compile(r"^\s*(HIDDEN_SIZE|NUM_LAYERS|NUM_ATTN_HEADS|INTERMEDIATE_SIZE)=", re.I)
    breaches = [
        f"{path}:{number}: {line.strip()}"
        for path in tracked()
        if path.suffix == ".sh" and path.parts[0] in ("examples", "toolkits")
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if (flag.search(line) or variable.search(line)) and not line.lstrip().startswith("#")
    ]
    law(breaches, "sizes come from config.json")


FORBIDDEN_CALLS = {
    "eval": "",
    "exec": "",
    "os.system": "use subprocess with a list",
    "os.popen": "use subprocess with a list",
    "pickle.load": "unpickling runs code",
    "pickle.loads": "unpickling runs code",
    "marshal.loads": "",
    "dill.load": "unpickling runs code",
    "yaml.load": "use yaml.safe_load",
}


def test_nothing_runs_code_that_data_brings(law):
    breaches = []
    for path, tree in (*sources(), *sources("toolkits")):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func)
            given = {k.arg: k.value for k in node.keywords}

            def is_true(key: str, given: dict = given) -> bool:
                return isinstance(given.get(key), ast.Constant) and bool(given[key].value)

            where = f"{path}:{node.lineno}: {name}"
            if name in FORBIDDEN_CALLS:
                breaches.append(f"{where} {FORBIDDEN_CALLS[name]}")
            if is_true("shell"):
                breaches.append(f"{where} with shell=True")
            if is_true("trust_remote_code"):
                breaches.append(f"{where} with trust_remote_code=True")
            if name == "torch.load" and not is_true("weights_only"):
                breaches.append(f"{where} without weights_only=True")
    law(breaches, "data must not be able to run code")


def test_every_silenced_check_says_which(law):
    breaches = []
    for path, _ in (*sources(), *sources("tests"), *sources("toolkits")):
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            bare = re.search(r"#\s*(type:\s*ignore(?!\[)|noqa(?!:))", line)
            if bare and "re.search" not in line:
                breaches.append(f"{path}:{number}: {line.strip()}")
    law(breaches, "name the code: `# type: ignore[code]`, `# noqa: CODE`")


def test_no_upstream_class_is_changed_outside_the_registry(law):
    """Assigning to an attribute of something imported from upstream is a patch without a record."""
    breaches = []
    for path, tree in sources():
        if path.parts[1:2] == ("patches",):
            continue
        upstream = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                "megatron",
                "torch",
                "transformers",
            ):
                upstream |= {a.asname or a.name for a in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in ("megatron", "torch", "transformers"):
                        upstream.add(alias.asname or alias.name.split(".")[0])
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                name = dotted(target)
                if "." in name and name.split(".")[0] in upstream:
                    breaches.append(f"{path}:{node.lineno}: {name} = ...")
    law(breaches, "make it a record of the patch registry")


def test_family_files_are_short(law):
    own = [ROOT / "megatron_patch" / "models" / f"{name}.py" for name in families.families()]
    files = [path for path in own if path.exists()]
    assert len(files) >= 4
    breaches = [
        f"{path.name}: {count} lines"
        for path in files
        if (count := len(path.read_text().splitlines())) > 150
    ]
    law(breaches, "a family has at most 150 lines; what several share belongs in models/blocks.py")


def test_launchers_are_short(law):
    launchers = [p for p in tracked() if re.match(r"examples/[^/_]+/[^/]+\.sh$", str(p))]
    assert launchers
    breaches = [
        f"{path}: {count} lines"
        for path in launchers
        if (count := len((ROOT / path).read_text().splitlines())) >= 60
    ]
    law(breaches, "a launcher has fewer than 60 lines; what several share belongs in _lib.sh")
