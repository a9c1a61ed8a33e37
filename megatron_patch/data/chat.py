"""Supervised fine-tuning samples: records of five schemas in, token ids and a loss mask out.

A conversation is rendered by the model's chat template in one piece and tokenized in one piece, so
the ids are those of ``apply_chat_template``. Loss is on what the assistant says in turns that are
to be trained, and the place of that is proven per turn, never assumed:

1. The template marks it (``{% generation %}``): the marked text, as transformers' assistant mask.
2. Rendering the messages before the turn with a generation prompt gives the beginning of the whole
   text, and so does rendering the messages up to the turn: what stands between is the turn.
3. Templates that write an earlier turn in another way than a last one (Qwen3 leaves its thinking
   out): the answer is replaced by two probes. What does not change with it is not the answer; the
   turn reaches from the end of the generation prompt's header to the end of the closing text that
   the template gives to that turn where it is the last.

Where none of these holds the sample is refused, with a reason. The end of a turn is its end-of-turn
token; white space after that is the template's and is not trained.

Masks are made by position. No token has a meaning here by its id: a pad token that equals the EOS,
or an end-of-turn inside a user's text, changes nothing.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_patch.data.template import REASONING, ChatTemplate, Message, Span, TemplateFailure
from megatron_patch.data.tokenizers import TextTokenizer
from megatron_patch.util import UserError

IGNORED = -100

SCHEMAS = ("tokenized", "messages", "conversations", "prompt-completion", "alpaca")
OVERLONG = ("drop", "truncate", "error")

_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class Refused(Exception):
    """A record that cannot be used; the text completes "line 7 ..."."""


@dataclass(frozen=True)
class Conversation:
    """A chat.

    Attributes:
        messages: What the template gets.
        trained: For each message, whether it is an assistant turn with loss.
        tools: JSON schemas, or None.
        variables: Further variables of the template.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[Any, ...] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plain:
    """A text and its continuation, without a template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokenized:
    """Ids (int32[n]) with the positions that have loss (uint8[n])."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """What is trained on.

    Attributes:
        ids: Token ids, int32[n].
        mask: uint8[n]: 1 where this token is a *target* with loss. Not shifted; the first is 0,
            for nothing stands before it.
    """

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Options:
    """How records become samples.

    Attributes:
        max_length: Longest sample in tokens, or None.
        on_overlong: ``drop``, ``truncate`` (keep the beginning) or ``error``.
        schema: One of ``SCHEMAS``, or None: told from each record's keys.
        plain_as: ``text`` (prompt, completion and EOS, no template) or ``chat`` (a user and an
            assistant turn) for prompts and completions that are strings.
        variables: Variables of the template for all records.
    """

    max_length: int | None = None
    on_overlong: str = "drop"
    schema: str | None = None
    plain_as: str = "text"
    variables: Mapping[str, Any] = field(default_factory=dict)


#: What is counted, and how a report says it.
NOTES: Mapping[str, str] = {
    "overlong_dropped": "samples longer than the maximum dropped",
    "overlong_truncated": "samples cut at the maximum",
    "overlong_emptied": "samples dropped because the cut left nothing to train",
    "untrained": "samples without a token to train dropped",
    "empty_answer": "empty answers (only their end is trained)",
    "open_end": "turns without an end-of-turn token (the model does not learn to stop there)",
    "probed": "turns that the template rewrites, located by probes",
    "thinking_left_out": "turns whose thinking the template leaves out",
    "edge_token": "tokens across the edge of a trained span (trained, as transformers does)",
    "special_text": "samples whose messages hold the text of a special token",
    "first_token": "first tokens marked for training (nothing predicts them)",
}


# ----------------------------------------------------------------------------------------- schemas


def schema_of(record: Mapping[str, Any]) -> str:
    """The schema of a record, by its keys.

    Raises:
        Refused: None fits.
    """
    if "input_ids" in record:
        return "tokenized"
    if record.get("messages") is not None:
        return "messages"
    if record.get("conversations") is not None or record.get("conversation") is not None:
        return "conversations"
    if record.get("prompt") is not None and record.get("completion") is not None:
        return "prompt-completion"
    if record.get("instruction") is not None and record.get("output") is not None:
        return "alpaca"
    there = ", ".join(map(repr, list(record)[:8])) or "none"
    raise Refused(
        f"fits no schema (keys: {there}); known are messages, conversations, prompt + completion, "
        "instruction + output, input_ids + labels"
    )


def parse(
    record: Mapping[str, Any], options: Options
) -> tuple[str, Conversation | Plain | Tokenized]:
    """The schema's name and the content of a record.

    Raises:
        Refused: A key is missing or holds something else than it should.
    """
    schema = options.schema or schema_of(record)
    try:
        if schema == "tokenized":
            return schema, _tokenized(record)
        if schema == "messages":
            return schema, _conversation(_list(record, "messages"), record)
        if schema == "conversations":
            key = "conversations" if record.get("conversations") is not None else "conversation"
            turns = [_sharegpt(turn, at) for at, turn in enumerate(_list(record, key))]
            system = record.get("system")
            if isinstance(system, str) and system and (not turns or turns[0]["role"] != "system"):
                turns.insert(0, {"role": "system", "content": system})
            return schema, _conversation(turns, record)
        if schema == "prompt-completion":
            return schema, _prompt_completion(record, options)
        return schema, _conversation(_alpaca(record), record)
    except KeyError as error:
        raise Refused(f"has no key {error.args[0]!r}, which the schema {schema} needs") from error


def _list(record: Mapping[str, Any], key: str) -> list[Any]:
    value = record[key]
    if isinstance(value, str):
        value = _from_json(value, key)
    if not isinstance(value, list) or not value:
        raise Refused(f"has no list of turns under {key!r}")
    return value


def _from_json(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Refused(f"has text under {key!r} that is no JSON ({error})") from error


def _string(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise Refused(f"has {type(value).__name__} under {key!r}, not text")
    return value


def _conversation(
    messages: Sequence[Any], record: Mapping[str, Any], first: int = 0
) -> Conversation:
    """Assistant turns from message ``first`` on are trained, unless their weight says no."""
    cleaned: list[Message] = []
    trained: list[bool] = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(f"has a message (number {number + 1}) without a role")
        wanted = _weight(message, number)
        role = message["role"]
        if wanted and role != "assistant":
            raise Refused(
                f"wants loss on message {number + 1} of role {role!r}; only assistant turns have it"
            )
        kept = {k: v for k, v in message.items() if k not in ("weight", "train") and v is not None}
        if role == "assistant":
            kept = _with_calls(kept, number)
        parts = kept.get("content", "")
        texts = parts if isinstance(parts, list) else [{"text": parts}]
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in texts):
            raise Refused(
                f"has content in message {number + 1} that is neither text nor a list of text parts"
            )
        if "content" not in kept and not kept.get("tool_calls"):
            if role != "assistant":
                raise Refused(f"has a message (number {number + 1}, {role}) without content")
            kept["content"] = ""
        cleaned.append(kept)
        trained.append(role == "assistant" and number >= first and wanted is not False)
    if not any(message["role"] == "assistant" for message in cleaned):
        raise Refused("has no assistant turn")
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _from_json(tools, "tools") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise Refused("has something else than a list under 'tools'")
    variables = record.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise Refused("has something else than an object under 'chat_template_kwargs'")
    return Conversation(tuple(cleaned), tuple(trained), tuple(tools) if tools else None, variables)


def _weight(message: Mapping[str, Any], number: int) -> bool | None:
    """What ``weight`` (OpenAI: 0 or 1) and ``train`` say; None: nothing."""
    said = {bool(v) for k in ("weight", "train") if (v := message.get(k)) is not None}
    for key in ("weight", "train"):
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise Refused(f"has {key} {value!r} in message {number + 1}; it may be 0 or 1")
    if len(said) > 1:
        raise Refused(f"has weight and train that contradict each other in message {number + 1}")
    return next(iter(said), None)


def _with_calls(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Tool calls in the form that templates take: a list, arguments as an object."""
    calls = message.pop("tool_calls", None)
    legacy = message.pop("function_call", None)
    if not calls and legacy:
        calls = [{"type": "function", "function": legacy}]
    if not calls:
        return message
    if not isinstance(calls, list):
        raise Refused(f"has something else than a list of tool_calls in message {number + 1}")
    made = []
    for call in calls:
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise Refused(f"has a tool call without a function name in message {number + 1}")
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            # OpenAI sends JSON in a string; templates would quote it once more.
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = inner["arguments"]
        inner = {**inner, "arguments": {} if arguments is None else arguments}
        made.append({**call, "function": inner} if "function" in call else inner)
    return {**message, "tool_calls": made}


_SHAREGPT_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def _sharegpt(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Refused(f"has a turn (number {number + 1}) that is no object")
    if turn.get("role") is not None and turn.get("from") is None:
        return turn
    name, value = turn.get("from"), turn.get("value")
    role = _SHAREGPT_ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise Refused(
            f"has a turn (number {number + 1}) from {name!r}; known are "
            f"{', '.join(_SHAREGPT_ROLES)}"
        )
    rest = {key: turn[key] for key in ("weight", "train", "tool_calls", *REASONING) if key in turn}
    if value is not None and not isinstance(value, str):
        raise Refused(f"has a turn (number {number + 1}) without text under 'value'")
    if name == "function_call":
        call = _from_json(value or "", "value")
        calls = call if isinstance(call, list) else [call]
        return {"role": role, "tool_calls": calls, **rest}
    return {"role": role, "content": value, **rest}


def _alpaca(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    question = _string(record, "instruction")
    more = record.get("input")
    if isinstance(more, str) and more:
        question = f"{question}\n{more}"
    messages: list[dict[str, Any]] = []
    system = record.get("system")
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for pair in record.get("history") or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Refused("has a history that is no list of [question, answer]")
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _string(record, "output")})
    return messages


def _prompt_completion(record: Mapping[str, Any], options: Options) -> Conversation | Plain:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation([*prompt, *completion], record, first=len(prompt))
    prompt, completion = _string(record, "prompt"), _string(record, "completion")
    if options.plain_as == "text":
        return Plain(prompt, completion)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return _conversation(turns, record)


def _tokenized(record: Mapping[str, Any]) -> Tokenized:
    ids = _integers(record, "input_ids")
    keys = [key for key in ("labels", "loss_mask", "assistant_masks", "completion_mask")
            if record.get(key) is not None]  # fmt: skip
    if not keys:
        raise Refused("has input_ids without labels (or loss_mask): nothing says what is trained")
    given = _integers(record, keys[0])
    if given.size != ids.size:
        raise Refused(f"has {ids.size} input_ids and {given.size} {keys[0]}")
    if keys[0] == "labels":
        mask = given != IGNORED
        if not np.array_equal(given[mask], ids[mask]):
            at = int(np.flatnonzero(mask & (given != ids))[0])
            raise Refused(
                f"has label {given[at]} over id {ids[at]} at position {at}: labels must be the ids "
                f"themselves, not shifted, or {IGNORED}"
            )
    else:
        mask = given == 1
        if not np.isin(given, (0, 1)).all():
            raise Refused(f"has {keys[0]} other than 0 and 1")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 2**31 - 1):
        raise Refused("has input_ids that are no token ids")
    return Tokenized(ids.astype(np.int32), mask.astype(np.uint8))


def _integers(record: Mapping[str, Any], key: str) -> npt.NDArray[np.int64]:
    value = np.array(record[key] if record[key] is not None else [], dtype=object)
    if value.ndim != 1 or not all(isinstance(v, int) for v in value):
        raise Refused(f"has something else than a list of integers under {key!r}")
    try:
        return value.astype(np.int64)
    except OverflowError as error:
        raise Refused(f"has an integer beyond 64 bits under {key!r}") from error


def without_nulls(value: Any) -> Any:
    """``value`` without the None entries that Parquet puts where another row has a key."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


# ------------------------------------------------------------------------------------------- spans


@dataclass(frozen=True)
class Rendered:
    """A text, the character spans of it that are trained, and what was noted on the way."""

    text: str
    spans: tuple[Span, ...]
    notes: Mapping[str, int] = field(default_factory=dict)


def _common(a: str, b: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices are compared at memory speed, characters in a loop are not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class Renderer:
    """Renders conversations and proves where their trained turns are.

    Args:
        template: The chat template.
        specials: Texts of special tokens: they end turns, and none stands inside one.
        added: Texts of all added tokens: headers begin with one (DeepSeek's are not special).
        variables: Variables of the template for all conversations.
    """

    def __init__(
        self,
        template: ChatTemplate,
        specials: Sequence[str],
        added: Sequence[str] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.template = template
        self.variables = dict(variables or {})
        self._stops = tuple({text for text in specials if text.strip()})
        self._special = _any_of(self._stops)
        self._added = _any_of([*self._stops, *(text for text in added if text.strip())])

    def render(self, chat: Conversation) -> Rendered:
        """The text and its trained spans.

        Raises:
            Refused: The template fails, or a turn's place cannot be proven.
        """
        chat = replace(chat, variables={**self.variables, **chat.variables})
        notes: Counter[str] = Counter()
        try:
            if self.template.marks_generation(chat.tools):
                text, spans = self._marked(chat)
            else:
                text = self._text(chat.messages, chat)
                spans = [
                    self._turn(number, text, chat, notes)
                    for number, wanted in enumerate(chat.trained)
                    if wanted
                ]
        except TemplateFailure as failure:
            raise Refused(f"cannot be rendered: {failure}") from failure
        if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
            raise Refused("has assistant turns whose places overlap in the rendered text")
        turns = [m for m, wanted in zip(chat.messages, chat.trained, strict=True) if wanted]
        if len(turns) == len(spans):
            for message, (start, end) in zip(turns, spans, strict=True):
                self._check(message, text[start:end])
                self._note(message, text[start:end], notes)
        if any(self._special.search(text) for m in chat.messages for text in _texts(m)):
            notes["special_text"] += 1
        return Rendered(text, tuple(spans), notes)

    def _check(self, message: Message, turn: str) -> None:
        """A turn that lacks what the message says is not that turn, or the template loses it."""
        for call in message.get("tool_calls") or ():
            name = call.get("function", call)["name"]
            if name not in turn:
                raise Refused(f"calls the tool {name!r}, which the chat template leaves out")
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [p["text"] for p in content or ()]
        for part in parts:
            answer = part.rpartition("</think>")[2].strip()
            if answer not in turn:
                raise Refused(
                    f"says {answer[:60]!r}, which the rendered text does not hold in its place"
                )

    def _note(self, message: Message, turn: str, notes: Counter[str]) -> None:
        content = message.get("content")
        if content == "" and not message.get("tool_calls"):
            notes["empty_answer"] += 1
        thinking = next((message[n] for n in REASONING if isinstance(message.get(n), str)), "")
        if not thinking and isinstance(content, str):
            thinking = "".join(_THINK.findall(content))
        if thinking.strip() and thinking.strip() not in turn:
            notes["thinking_left_out"] += 1
        if not turn.rstrip().endswith(self._stops):
            notes["open_end"] += 1

    def _text(
        self, messages: Sequence[Message], chat: Conversation, *, prompt: bool = False
    ) -> str:
        return self.template.render(messages, chat.tools, chat.variables, generation_prompt=prompt)

    def _marked(self, chat: Conversation) -> tuple[str, list[Span]]:
        text, spans = self.template.render_marked(chat.messages, chat.tools, chat.variables)
        turns = [n for n, m in enumerate(chat.messages) if m["role"] == "assistant"]
        wanted = [chat.trained[n] for n in turns]
        if not spans and any(wanted):
            raise Refused("has assistant turns of which the chat template marks none as generated")
        if not all(wanted):
            # Which turn is which block has to be known only where they differ.
            if len(spans) != len(turns):
                raise Refused(
                    f"trains some of {len(turns)} assistant turns, and the chat template marks "
                    f"{len(spans)} generations: they cannot be told apart"
                )
            spans = [span for span, w in zip(spans, wanted, strict=True) if w]
        return text, spans

    def _turn(self, number: int, text: str, chat: Conversation, notes: Counter[str]) -> Span:
        """Characters of an assistant turn: what the model generates, its end token included."""
        before, here = chat.messages[:number], chat.messages[: number + 1]
        opened = self._text(before, chat, prompt=True)
        closed = text if len(here) == len(chat.messages) else self._text(here, chat)
        header = self._header(before, opened, chat, number)
        if text.startswith(opened) and text.startswith(closed) and len(closed) >= len(opened):
            start = len(opened)
            if not header.strip():
                content, _ = self._probe(number, chat.messages, chat)
                if text[start : _common(content, text)].strip():
                    raise self._unproven(
                        number,
                        "the template opens it with text and takes no notice of "
                        "add_generation_prompt, so that text may be the prompt or the answer",
                    )
            return start, max(start, self._end(closed))
        span = self._rewritten(number, text, header, chat)
        notes["probed"] += 1
        return span

    def _header(
        self, before: Sequence[Message], opened: str, chat: Conversation, number: int
    ) -> str:
        """What the generation prompt adds after the messages before the turn."""
        try:
            plain = self._text(before, chat)
        except TemplateFailure:
            if before:
                raise
            plain = ""
        if not opened.startswith(plain):
            raise self._unproven(number, "the generation prompt changes the text before it")
        return opened[len(plain) :]

    def _end(self, closed: str) -> int:
        """End of the turn at the end of ``closed``: white space after an end token is outside."""
        stripped = closed.rstrip()
        return len(stripped) if stripped.endswith(self._stops) else len(closed)

    def _rewritten(self, number: int, text: str, header: str, chat: Conversation) -> Span:
        before, after = self._probe(number, chat.messages, chat)
        if not text.endswith(after):
            raise self._unproven(number, "what the template writes after it depends on its text")
        limit = _common(before, text)  # the template's own text up to here
        mark = self._added.search(header)
        if mark is None:
            raise self._unproven(number, "the generation prompt has no added token to find it by")
        anchor = header[: mark.end()]
        at = text.rfind(anchor, 0, limit)
        if at < 0:
            raise self._unproven(number, "the generation prompt is not in the text before it")
        start = at + min(_common(header, text[at : at + len(header)]), limit - at)
        if self._special.search(text, start, limit) or start < at + len(anchor):
            raise self._unproven(number, "other special tokens stand between prompt and answer")
        _, closing = self._probe(number, chat.messages[: number + 1], chat)
        closing = closing[: self._end(closing)]
        if not after.startswith(closing):
            raise self._unproven(number, "the template closes it otherwise than a last turn")
        end = len(text) - len(after) + len(closing)
        if end < start:
            raise self._unproven(number, "it would end before it begins")
        return start, end

    def _probe(
        self, number: int, messages: Sequence[Message], chat: Conversation
    ) -> tuple[str, str]:
        """The text before and after the answer, as it is whatever the answer says."""
        found = []
        for first, last in (("Q", "v"), ("Z", "k")):
            probe = f"{first}0pr0be{last}"
            while any(probe in text for message in messages for text in _texts(message)):
                probe = f"{first}0{probe[1:-1]}{last}"
            content = messages[number].get("content")
            value = [{"type": "text", "text": probe}] if isinstance(content, list) else probe
            changed = [*messages]
            changed[number] = {**messages[number], "content": value}
            parts = self._text(changed, chat).split(probe)
            if len(parts) != 2:
                raise self._unproven(number, f"the template writes its text {len(parts) - 1} times")
            found.append((parts[0], parts[1]))
        if found[0] != found[1]:
            raise self._unproven(number, "the text around it depends on its text")
        return found[0]

    def _unproven(self, number: int, why: str) -> Refused:
        return Refused(
            f"has an assistant turn (message {number + 1}) whose place in the rendered text cannot "
            f"be proven: {why}. A template that marks it with {{% generation %}} settles it "
            "(--chat-template FILE)"
        )


def _texts(message: Message) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]
    for name in REASONING:
        if isinstance(message.get(name), str):
            yield message[name]


# ------------------------------------------------------------------------------------------ encoder


class Encoder:
    """Turns records into samples.

    Args:
        tokenizer: Of kind ``huggingface``: positions of tokens in the text are needed.
        template: The chat template; None refuses chats.
        options: Lengths, schema and so on.

    Raises:
        UserError: The tokenizer cannot tell positions, or an option is not known.
    """

    def __init__(
        self, tokenizer: TextTokenizer, template: ChatTemplate | None, options: Options
    ) -> None:
        if tokenizer.kind != "huggingface":
            raise UserError(
                f"{tokenizer.source} is a {tokenizer.kind} vocabulary, which does not tell where a "
                "token stands in the text. Save the tokenizer once as tokenizer.json with "
                "transformers' save_pretrained."
            )
        if options.on_overlong not in OVERLONG:
            raise UserError(f"--on-overlong {options.on_overlong}: give {', '.join(OVERLONG)}.")
        if options.schema is not None and options.schema not in SCHEMAS:
            raise UserError(f"--schema {options.schema}: give one of {', '.join(SCHEMAS)}.")
        self.tokenizer = tokenizer
        self.template = template
        self.options = options
        self._fast = _without_post_processor(tokenizer)
        known = self._fast.get_added_tokens_decoder().values()
        added = [str(token.content) for token in known]
        specials = [str(token.content) for token in known if token.special]
        if tokenizer.eod is not None:
            specials.append(tokenizer.eod.text)
        self._renderer = (
            Renderer(template, specials, added, options.variables) if template is not None else None
        )

    def encode(
        self, records: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Sample | Refused | None], Counter[str]]:
        """Samples of records.

        Returns:
            For each record its sample, or why it is refused, or None: dropped and counted. And the
            counts, by the names in ``NOTES`` and ``schema:NAME``.
        """
        counts: Counter[str] = Counter()
        outcomes: list[Sample | Refused | None] = [None] * len(records)
        rendered: list[tuple[int, Rendered, bool]] = []
        for number, record in enumerate(records):
            try:
                schema, content = parse(record, self.options)
                if isinstance(content, Tokenized):
                    outcomes[number] = self._finish(content.ids, content.mask, counts)
                else:
                    plain = isinstance(content, Plain)
                    text = (
                        self._plain(content) if isinstance(content, Plain) else self._chat(content)
                    )
                    text.text.encode()
                    rendered.append((number, text, plain))
                counts[f"schema:{schema}"] += 1
            except Refused as refused:
                outcomes[number] = refused
            except UnicodeEncodeError as error:
                code = ord(error.object[error.start])
                outcomes[number] = Refused(f"has a lone surrogate \\u{code:04x}")
        encodings = self._fast.encode_batch(
            [text.text for _, text, _ in rendered], add_special_tokens=False
        )
        for (number, text, plain), encoding in zip(rendered, encodings, strict=True):
            noted = Counter(text.notes)
            ids = np.array(encoding.ids, dtype=np.int32)
            mask = _token_mask(encoding, text.spans, noted)
            try:
                if plain:
                    ids, mask = self._around(ids, mask)
                outcomes[number] = self._finish(ids, mask, counts)
            except Refused as refused:
                outcomes[number] = refused
                continue
            if outcomes[number] is not None:
                counts.update(noted)
        return outcomes, counts

    def _chat(self, chat: Conversation) -> Rendered:
        if self._renderer is None:
            raise Refused(
                "is a chat, and the model has no chat template (no chat_template.jinja, none in "
                "tokenizer_config.json); give one with --chat-template FILE"
            )
        return self._renderer.render(chat)

    def _plain(self, content: Plain) -> Rendered:
        if self.tokenizer.eod is None:
            raise Refused(
                f"needs an end after its completion, and {self.tokenizer.source} names no EOS "
                "token; name one with --eod-token"
            )
        text = content.prompt + content.completion
        notes = {"empty_answer": 1} if not content.completion else {}
        return Rendered(text, ((len(content.prompt), len(text)),), notes)

    def _around(
        self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """The tokenizer's own BOS in front, one EOS behind, which is trained."""
        assert self.tokenizer.eod is not None
        end = [] if ids.size and ids[-1] == self.tokenizer.eod.id else [self.tokenizer.eod.id]
        front = np.array(self.tokenizer.prefix, np.int32)
        ids = np.concatenate([front, ids, np.array(end, np.int32)])
        mask = np.concatenate([np.zeros_like(front, np.uint8), mask, np.ones(len(end), np.uint8)])
        return ids, mask

    def _finish(
        self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], counts: Counter[str]
    ) -> Sample | None:
        if ids.size and int(ids.max()) > self.tokenizer.largest_id:
            raise Refused(
                f"has id {ids.max()}, beyond the vocabulary's {self.tokenizer.largest_id}"
            )
        if mask.size and mask[0]:
            counts["first_token"] += 1
            mask = mask.copy()
            mask[0] = 0
        if not mask.any():
            counts["untrained"] += 1
            return None
        limit = self.options.max_length
        if limit is not None and ids.size > limit:
            if self.options.on_overlong == "error":
                raise Refused(f"has {ids.size} tokens, more than the maximum of {limit}")
            if self.options.on_overlong == "drop":
                counts["overlong_dropped"] += 1
                return None
            ids, mask = ids[:limit].copy(), mask[:limit].copy()
            if not mask.any():
                counts["overlong_emptied"] += 1
                return None
            counts["overlong_truncated"] += 1
        counts["samples"] += 1
        counts["tokens"] += int(ids.size)
        counts["trained_tokens"] += int(mask.sum())
        return Sample(ids, mask)


def _without_post_processor(tokenizer: TextTokenizer) -> Any:
    """The tokenizer with untouched positions: a byte-level post-processor cuts spaces off them."""
    from tokenizers import Tokenizer

    engine = tokenizer.reference
    fast = Tokenizer.from_str(engine.tokenizer.to_str())  # type: ignore[attr-defined]
    fast.post_processor = None
    return fast


def _token_mask(encoding: Any, spans: Sequence[Span], notes: Counter[str]) -> npt.NDArray[np.uint8]:
    """1 for every token that holds a character of a span, as transformers' assistant mask."""
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(offsets), np.uint8)
    for start, end in spans:
        inside = (offsets[:, 1] > start) & (offsets[:, 0] < end)
        mask[inside] = 1
        across = inside & ((offsets[:, 0] < start) | (offsets[:, 1] > end))
        notes["edge_token"] += int(across.sum())
    return mask
