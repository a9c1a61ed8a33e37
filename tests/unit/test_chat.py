"""Chats become the ids of apply_chat_template, and loss falls on what the assistant says: only."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import chat_fixtures as fx
from chat_fixtures import assistant, call, user

from megatron_patch.data import template, tokenizers
from megatron_patch.data.chat import Encoder, Options, Refused, Sample, parse, schema_of
from megatron_patch.data.tokenizers import TokenizerRequest
from megatron_patch.util import UserError

NAMES = ("chatml", "thinking", "headers", "opened", "instruct", "marked", "silent")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "<int> & 'b'"}}}]
QA = [user("2+2?"), assistant("4")]
TWO = [user("2+2?"), assistant("4"), user("and 3?"), assistant(" 7\n")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: fx.model(root / name, name) for name in NAMES}


def encoder(folder: Path, **options: Any) -> Encoder:
    tokenizer = tokenizers.load(TokenizerRequest("HuggingFaceTokenizer", str(folder)))
    return Encoder(tokenizer, template.load(folder), Options(**options))


def one(made: Encoder, record: dict[str, Any]) -> tuple[Sample, dict[str, int]]:
    outcomes, counts = made.encode([record])
    if isinstance(outcomes[0], Refused):
        raise outcomes[0]
    assert outcomes[0] is not None, counts
    return outcomes[0], counts


def runs(made: Encoder, sample: Sample) -> list[str]:
    """The trained pieces of text."""
    decode = made.tokenizer.reference.tokenizer.decode
    edges = [0, *(np.flatnonzero(np.diff(sample.mask)) + 1).tolist(), sample.mask.size]
    return [
        decode(sample.ids[a:b].tolist(), skip_special_tokens=False)
        for a, b in itertools.pairwise(edges)
        if sample.mask[a]
    ]


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


# ------------------------------------------------------------------------------------ rendering

CHATS: list[dict[str, Any]] = [
    {"messages": QA},
    {"messages": TWO},
    {"messages": [{"role": "system", "content": "Be brief. é 中 😀"}, *TWO]},
    {"messages": [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant("d")]},
    {"messages": [user("a"), assistant("b", reasoning_content="because")]},
    {"messages": [user("a"), assistant("b", thinking="other name", reasoning=None)]},
    {"messages": [user("<|im_end|>\n<|im_start|>assistant\nno"), assistant("")]},
    {"messages": QA, "tools": TOOLS},
    {
        "messages": [
            user("3+4"),
            assistant(None, tool_calls=[fx.call("add", a=3, b="é<&'")]),
            {"role": "tool", "name": "add", "content": "7"},
            assistant("It is 7."),
        ],
        "tools": TOOLS,
    },
]


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(models, name):
    theirs, made = reference(models[name]), encoder(models[name])
    compared = 0
    for record in CHATS:
        chat = parse(record, Options())[1]
        try:
            expected = theirs.apply_chat_template(
                record["messages"], tools=record.get("tools"), tokenize=False
            )
        except Exception:
            with pytest.raises(template.TemplateFailure):
                made.template.render(chat.messages, chat.tools)
            continue
        assert made.template.render(chat.messages, chat.tools) == expected
        ids = theirs(expected, add_special_tokens=False)["input_ids"]
        if name == "silent" or (name == "headers" and chat.messages[1].get("tool_calls")):
            continue  # refused, see below
        sample, _ = one(made, record)
        assert sample.ids.tolist() == ids
        compared += 1
    assert compared >= 4 or name == "silent"


def test_mask_is_that_of_transformers_where_generations_are_marked(models):
    theirs, made = reference(models["marked"]), encoder(models["marked"])
    for record in CHATS[:7]:
        expected = theirs.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        sample, _ = one(made, record)
        assert sample.ids.tolist() == expected["input_ids"]
        assert sample.mask.tolist() == expected["assistant_masks"]
        assert sample.mask.sum() > 0


def test_white_space_at_the_edge_counts(models):
    """Byte-level post-processors cut spaces off positions; a leading space is said all the same."""
    for name in ("marked", "chatml"):
        made = encoder(models[name])
        for text in ("  indented", "    ", " 7\n"):
            sample, counts = one(made, {"messages": [user("q"), assistant(text)]})
            assert runs(made, sample) == [text + "<|im_end|>"]
            assert counts["edge_token"] == 0
        # The header's line end and the answer's become one token, which belongs to both.
        sample, counts = one(made, {"messages": [user("q"), assistant("\n x")]})
        assert runs(made, sample) == ["\n\n x<|im_end|>"]
        assert counts["edge_token"] == 1


def test_template_files_in_the_order_of_transformers(tmp_path):
    folder = fx.model(tmp_path / "m", None, chat_template="config {{ messages[0].content }}")
    assert template.load(folder).render([user("x")]) == "config x"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = fx.model(tmp_path / "m", None, chat_template=named)
    assert template.load(folder).render([user("x")]) == "plain"
    assert template.load(folder).render([user("x")], TOOLS) == "tools"
    theirs = reference(folder)
    assert theirs.apply_chat_template([user("x")], tools=TOOLS, tokenize=False) == "tools"
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert template.load(folder).render([user("x")]) == "file </s>"
    assert reference(folder).apply_chat_template([user("x")], tokenize=False) == "file </s>"
    own = tmp_path / "own.jinja"
    own.write_text("own {{ bos_token }}")
    assert template.load(folder, override=str(own)).render([user("x")]) == "own <s>"
    own.write_text("{% if %}")
    with pytest.raises(UserError, match="no valid Jinja"):
        template.load(folder, override=str(own))
    (folder / "chat_template.jinja").unlink()
    fx.model(folder, None)
    assert template.load(folder) is None


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__init__=1) %}",
        "{{ lipsum.__globals__['os'].system('true') }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(tmp_path, attack):
    path = tmp_path / "t.jinja"
    path.write_text(attack)
    made = template.load(fx.model(tmp_path / "m", None), override=str(path))
    with pytest.raises(template.TemplateFailure):
        made.render([user("x")])


def test_generation_marks_inside_macros_and_filters(tmp_path):
    """transformers misplaces these; here they are exact, or refused."""
    path = tmp_path / "t.jinja"
    body = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    path.write_text(
        "{% macro say(m) %}A:" + body + "{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ say(m) }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    folder = fx.model(tmp_path / "m", None)
    made = template.load(folder, override=str(path))
    text, spans = made.render_marked(TWO)
    assert [text[a:b] for a, b in spans] == ["4<|im_end|>", " 7\n<|im_end|>"]
    path.write_text(
        "{% set x %}" + body.replace("m.", "messages[1].") + "{% endset %}{{ x }}{{ x | length }}"
    )
    with pytest.raises(template.TemplateFailure, match="cannot be told"):
        template.load(folder, override=str(path)).render_marked(TWO)
    with pytest.raises(template.TemplateFailure, match="FDD0"):
        template.load(folder, override=str(fx.TEMPLATES / "marked.jinja")).render_marked(
            [user("\ufdd0"), assistant("x")]
        )


# ---------------------------------------------------------------------------------------- spans

TURNS = [
    ("chatml", TWO, ["4<|im_end|>", " 7\n<|im_end|>"]),
    ("marked", TWO, ["4<|im_end|>", " 7\n<|im_end|>"]),
    ("headers", TWO, ["4<|eot_id|>", "7<|eot_id|>"]),
    ("instruct", TWO, [" 4</s>", "  7\n</s>"]),
    ("opened", TWO, ["4</s>", " 7\n</s>"]),
    ("opened", [user("a"), assistant("<think>\nhm</think>b")], ["b</s>"]),
    ("thinking", TWO, ["4<|im_end|>", "<think>\n\n</think>\n\n 7\n<|im_end|>"]),
    (
        "thinking",
        [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant("d")],
        ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"],
    ),
    (
        "thinking",
        [
            user("a"),
            assistant("b", reasoning_content="hm"),
            user("c"),
            assistant("d", reasoning="e"),
        ],
        ["b<|im_end|>", "<think>\ne\n</think>\n\nd<|im_end|>"],
    ),
    (
        "thinking",  # the first call's prompt shows its thinking; the final text does not
        [
            user("3+4"),
            assistant("", reasoning_content="use a tool", tool_calls=[call("add", a=3)]),
            {"role": "tool", "content": "7"},
            assistant("It is 7.", reasoning_content="easy"),
            user("thanks"),
            assistant("welcome"),
        ],
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>',
            "It is 7.<|im_end|>",
            "<think>\n\n</think>\n\nwelcome<|im_end|>",
        ],
    ),
    (
        "chatml",
        [
            user("3+4"),
            assistant(None, tool_calls=[call("add", a=3), call("add", a=4)]),
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
            assistant("7"),
        ],
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call><|im_end|>',
            "7<|im_end|>",
        ],
    ),
    (
        "chatml",  # the end of a turn and a header in the user's text, the same answer three times
        [user("4<|im_end|>\n<|im_start|>assistant\n4"), assistant("4"), user("4"), assistant("4")],
        ["4<|im_end|>", "4<|im_end|>"],
    ),
    ("chatml", [user("a"), assistant("b"), assistant("c")], ["b<|im_end|>", "c<|im_end|>"]),
    ("chatml", [user("a"), assistant("")], ["<|im_end|>"]),
]


@pytest.mark.parametrize(("name", "messages", "expected"), TURNS)
def test_loss_is_on_what_the_assistant_says(models, name, messages, expected):
    made = encoder(models[name])
    sample, _ = one(made, {"messages": messages})
    assert runs(made, sample) == expected
    assert sample.mask.dtype == np.uint8
    assert sample.ids.dtype == np.int32


def test_weights_choose_turns(models):
    for name in ("chatml", "marked"):
        made = encoder(models[name])
        for key, off in (("weight", 0), ("train", False)):
            first = [user("2+2?"), assistant("4", **{key: off}), *TWO[2:]]
            assert runs(made, one(made, {"messages": first})[0]) == [" 7\n<|im_end|>"]
            last = [*TWO[:3], assistant(" 7\n", **{key: off})]
            assert runs(made, one(made, {"messages": last})[0]) == ["4<|im_end|>"]
    none = {"messages": [user("a"), assistant("b", weight=0)]}
    outcomes, counts = made.encode([none])
    assert outcomes == [None]
    assert counts["untrained"] == 1
    assert counts["samples"] == 0


REFUSED = [
    ("silent", {"messages": QA}, "takes no notice of add_generation_prompt"),
    ("instruct", {"messages": [user("a"), user("b"), assistant("c")]}, "roles must alternate"),
    ("chatml", {"messages": [user("a")]}, "no assistant turn"),
    ("chatml", {"messages": [user("a"), assistant("b", weight=0.5)]}, "weight 0.5 in message 2"),
    ("chatml", {"messages": [user("a"), assistant("b", weight=1, train=False)]}, "contradict"),
    (
        "chatml",
        {"messages": [{**user("a"), "train": True}, assistant("b")]},
        "only assistant turns",
    ),
    ("chatml", {"messages": [{"content": "x"}]}, "message (number 1) without a role"),
    ("chatml", {"messages": "not json"}, "no JSON"),
    ("chatml", {"text": "x"}, "fits no schema (keys: 'text')"),
    ("headers", {"messages": [user("a"), assistant(None, tool_calls=[call("f")])]}, "leaves out"),
    ("chatml", {"messages": [user(7), assistant("b")]}, "content in message 1 that is neither"),
    ("chatml", {"messages": [user("\ud800"), assistant("b")]}, "lone surrogate \\ud800"),
    ("chatml", {"conversations": [{"from": "alien", "value": "x"}]}, "from 'alien'"),
    ("chatml", {"input_ids": [1, 2]}, "without labels"),
    ("chatml", {"input_ids": [1, 2], "labels": [2, 1]}, "not shifted"),
    ("chatml", {"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
    ("chatml", {"input_ids": [1, 9999], "labels": [1, 9999]}, "beyond the vocabulary"),
    ("chatml", {"input_ids": [1.5], "labels": [1]}, "list of integers"),
]


@pytest.mark.parametrize(("name", "record", "why"), REFUSED)
def test_what_cannot_be_proven_is_refused(models, name, record, why):
    with pytest.raises(Refused) as caught:
        one(encoder(models[name]), record)
    assert why in str(caught.value)


BAD_TEMPLATES = {
    "writes its text 2 times": "{{ m.content }}{{ m.content }}",
    "depends on its text": "{{ m.content }}{{ m.content | length }}",
    "otherwise than a last turn": "{{ m.content }}{% if not loop.last %}|{% endif %}",
}


@pytest.mark.parametrize("why", BAD_TEMPLATES)
def test_rewriting_that_cannot_be_undone_is_refused(tmp_path, why):
    """Not the beginning of the whole text, so probes decide: and they see it."""
    path = tmp_path / "t.jinja"
    path.write_text(
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + BAD_TEMPLATES[why]
        + "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = fx.model(tmp_path / "m", None)
    tokenizer = tokenizers.load(TokenizerRequest("HuggingFaceTokenizer", str(folder)))
    made = Encoder(tokenizer, template.load(folder, override=str(path)), Options())
    with pytest.raises(Refused, match=why):
        one(made, {"messages": TWO})


def chatml(messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The chatml fixture without tools, written down once more: pieces, and whether trained."""
    pieces = []
    if messages[0]["role"] != "system":
        pieces.append(("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", False))
    for message in messages:
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        trained = message["role"] == "assistant"
        pieces.append((message["content"] + "<|im_end|>", trained))
        pieces.append(("\n", False))
    return pieces


def thinking(messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The thinking fixture without tool calls, likewise."""
    last = max(n for n, m in enumerate(messages) if m["role"] == "user")
    pieces = []
    for number, message in enumerate(messages):
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        said = message["content"]
        if message["role"] == "assistant":
            thought = message.get("reasoning_content") or ""
            if not thought and "</think>" in said:
                thought = said.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
                said = said.split("</think>")[-1].lstrip("\n")
            if number > last and (number == len(messages) - 1 or thought):
                inner = thought.strip("\n")
                said = f"<think>\n{inner}\n</think>\n\n" + said.lstrip("\n")
        pieces.append((said + "<|im_end|>", message["role"] == "assistant"))
        pieces.append(("\n", False))
    return pieces


CONTENTS = st.lists(
    st.sampled_from(
        ["a", " ", "\n", "4", "é", "中", "😀", "<think>", "</think>", "<|im_end|>", "<|im_start|>",
         "assistant", "assistant\n", "user\n", "<", "|", "Q0pr0bev", "\t", "</s>", "1234", "I'll "]
    ),
    max_size=6,
).map("".join)  # fmt: skip


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(CONTENTS)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append(user(draw(CONTENTS)))
        message = assistant(draw(CONTENTS))
        if draw(st.booleans()):
            message["reasoning_content"] = draw(CONTENTS)
        messages.append(message)
    return messages


@pytest.mark.parametrize(("name", "oracle"), [("chatml", chatml), ("thinking", thinking)])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=conversations())
def test_any_conversation_is_masked_exactly_or_refused(models, name, oracle, messages):
    made = MADE.setdefault(name, encoder(models[name]))
    pieces = oracle(messages)
    text = "".join(piece for piece, _ in pieces)
    wanted = np.concatenate([np.full(len(piece), trained) for piece, trained in pieces])
    try:
        sample, _ = one(made, {"messages": messages})
    except Refused as refused:
        assert name == "thinking" and "cannot be proven" in str(refused)
        return
    encoding = made._fast.encode(text, add_special_tokens=False)
    assert sample.ids.tolist() == encoding.ids
    mask = [bool(wanted[a:b].any()) for a, b in encoding.offsets]
    assert sample.mask.astype(bool).tolist() == mask


MADE: dict[str, Encoder] = {}


def test_few_honest_conversations_are_refused(models):
    """Texts without control tokens are always provable, rewritten turns or not."""
    made = encoder(models["thinking"])
    messages = [user("a"), assistant("b", reasoning_content="c")] * 4
    sample, counts = one(made, {"messages": messages})
    assert runs(made, sample)[-1] == "<think>\nc\n</think>\n\nb<|im_end|>"
    assert counts["probed"] == 3
    assert counts["thinking_left_out"] == 3


# ---------------------------------------------------------------------------------------- schemas


def test_schemas_are_named_and_agree(models):
    made = encoder(models["chatml"])
    first, _ = one(made, {"messages": TWO})
    same = [
        ("conversations", {"conversations": [
            {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"},
            {"from": "human", "value": "and 3?"}, {"from": "gpt", "value": " 7\n"}]}),
        ("conversations", {"conversations": TWO}),
        ("alpaca", {"instruction": "and 3?", "input": "", "output": " 7\n",
                    "history": [["2+2?", "4"]]}),
        ("messages", {"messages": json.dumps(TWO), "tools": "[]", "prompt": "x"}),
    ]  # fmt: skip
    for schema, record in same:
        sample, counts = one(made, record)
        assert counts[f"schema:{schema}"] == 1
        assert sample.ids.tolist() == first.ids.tolist(), schema
        assert sample.mask.tolist() == first.mask.tolist(), schema
    completion = {"prompt": TWO[:3], "completion": TWO[3:]}
    sample, counts = one(made, completion)
    assert counts["schema:prompt-completion"] == 1
    assert sample.ids.tolist() == first.ids.tolist()
    assert runs(made, sample) == [" 7\n<|im_end|>"]  # only the completion
    with_input = {"instruction": "Add.", "input": "2, 2", "output": "4"}
    chat = parse(with_input, Options())[1]
    assert chat.messages[0]["content"] == "Add.\n2, 2"
    assert schema_of({"input_ids": [], "labels": [], "messages": []}) == "tokenized"


def test_calls_of_openai_and_sharegpt_become_objects():
    record = {
        "messages": [
            user("x"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"a": [1]}'},
                    }
                ],
            },
        ]
    }
    chat = parse(record, Options())[1]
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert "content" not in chat.messages[1]
    turns = [{"from": "human", "value": "x"},
             {"from": "function_call", "value": '{"name": "f", "arguments": {"a": [1]}}'},
             {"from": "observation", "value": "7"}, {"from": "gpt", "value": "7"}]  # fmt: skip
    shared = parse({"conversations": turns, "system": "s"}, Options())[1]
    assert [m["role"] for m in shared.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert shared.messages[2]["tool_calls"][0]["arguments"] == {"a": [1]}
    assert shared.trained == (False, False, True, False, True)


def test_prompt_and_completion_get_one_end(models):
    made = encoder(models["chatml"])
    ids = made.tokenizer.reference.tokenizer.encode("p0 p1a0 a1", add_special_tokens=False).ids
    for completion in ("a0 a1", "a0 a1</s>"):
        sample, _ = one(made, {"prompt": "p0 p1", "completion": completion})
        assert sample.ids.tolist() == [*ids, made.tokenizer.eod.id]
        assert runs(made, sample)[0].endswith("</s>")
    sample, counts = one(made, {"prompt": "p", "completion": ""})
    assert runs(made, sample) == ["</s>"]
    assert counts["empty_answer"] == 1
    chat, _ = one(encoder(models["chatml"], plain_as="chat"), {"prompt": "2+2?", "completion": "4"})
    assert chat.ids.tolist() == one(made, {"messages": QA})[0].ids.tolist()


def test_missing_eos_is_said(tmp_path):
    folder = fx.model(tmp_path / "m", "chatml", eos_token=None, pad_token=None)
    made = encoder(folder)
    with pytest.raises(Refused, match="names no EOS token; name one with --eod-token"):
        one(made, {"prompt": "a", "completion": "b"})
    assert runs(made, one(made, {"messages": QA})[0]) == [
        "4<|im_end|>"
    ]  # chats bring their own end
    bare = tmp_path / "bare.jinja"
    bare.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    made = Encoder(made.tokenizer, template.load(folder, override=str(bare)), Options())
    sample, counts = one(made, {"messages": TWO[:2]})
    assert "".join(runs(made, sample)).strip() == "4"
    assert counts["open_end"] == 1


def test_eos_that_is_pad_and_end_of_turn_keeps_its_loss(tmp_path):
    folder = fx.model(tmp_path / "m", "chatml", eos_token="<|im_end|>", pad_token="<|im_end|>")
    made = encoder(folder)
    sample, _ = one(made, {"messages": TWO})
    ends = np.flatnonzero(sample.ids == made.tokenizer.eod.id)
    assert ends.size == 5  # the system's, two of the user, two of the assistant
    assert sample.mask[ends].tolist() == [0, 0, 1, 0, 1]


def test_pretokenized_is_taken_as_it_is(models):
    made = encoder(models["chatml"])
    sample, counts = one(made, {"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, 8]})
    assert sample.ids.tolist() == [5, 6, 7, 8]
    assert sample.mask.tolist() == [0, 0, 1, 1]
    assert counts["first_token"] == 1
    sample, _ = one(made, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]})
    assert sample.mask.tolist() == [0, 1, 0]


def test_overlong_samples_have_true_counts(models):
    records = [{"input_ids": [9] * n, "loss_mask": [0] * (n - 1) + [1]} for n in (3, 4, 5, 6)]
    records.append({"input_ids": [9] * 6, "loss_mask": [0, 1, 1, 1, 1, 1]})
    dropped, counts = encoder(models["chatml"], max_length=4).encode(records)
    assert [s is not None for s in dropped] == [True, True, False, False, False]
    assert counts["overlong_dropped"] == 3
    assert (counts["samples"], counts["tokens"], counts["trained_tokens"]) == (2, 7, 2)
    cut, counts = encoder(models["chatml"], max_length=4, on_overlong="truncate").encode(records)
    assert [s.ids.size if s else None for s in cut] == [3, 4, None, None, 4]
    assert (counts["overlong_truncated"], counts["overlong_emptied"]) == (1, 2)
    assert (counts["samples"], counts["tokens"], counts["trained_tokens"]) == (3, 11, 5)
    errors, counts = encoder(models["chatml"], max_length=4, on_overlong="error").encode(records)
    assert [isinstance(e, Refused) for e in errors] == [False, False, True, True, True]
    assert "has 5 tokens, more than the maximum of 4" in str(errors[2])


def test_notes_are_true(models):
    made = encoder(models["chatml"])
    _, counts = made.encode(
        [
            {"messages": [user("<|im_end|>"), assistant("")]},
            {"messages": [user("x"), assistant("y")]},
            {"nothing": 1},
        ]
    )
    assert counts["special_text"] == 1
    assert counts["empty_answer"] == 1
    assert counts["samples"] == 2


def test_variables_reach_the_template(models):
    made = encoder(models["thinking"], variables={"enable_thinking": False})
    sample, _ = one(made, {"messages": QA})
    assert runs(made, sample) == ["4<|im_end|>"]  # the empty thought is the prompt's now
    made = encoder(models["thinking"])
    record = {"messages": QA, "chat_template_kwargs": {"enable_thinking": False}}
    assert runs(made, one(made, record)[0]) == ["4<|im_end|>"]


def test_encoding_loads_neither_torch_nor_transformers(models):
    code = (
        "import sys\nfrom megatron_patch.data import chat, template, tokenizers, show, sft_store\n"
        f"f = {str(models['chatml'])!r}\n"
        "t = tokenizers.load(tokenizers.TokenizerRequest('HuggingFaceTokenizer', f))\n"
        "e = chat.Encoder(t, template.load(f), chat.Options())\n"
        f"print(e.encode([{{'messages': {QA!r}}}])[1]['samples'])\n"
        "heavy = ('torch', 'transformers', 'megatron', 'matplotlib')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["1", "[]"], done.stderr
