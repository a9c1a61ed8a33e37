"""A model's chat template: found, compiled and rendered as transformers does, without importing it.

Templates are code from strangers: they run in jinja2's immutable sandbox and see plain JSON values
only. A ``{% generation %}`` block is tracked by marks around its text that are taken out again, and
the text without them is compared with a rendering that had none, so a span is exact also where the
block stands inside a macro or a filter.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_patch.data.tokenizers import NAMED_TOKENS, content_of, read_json
from megatron_patch.util import UserError

Message = Mapping[str, Any]
Span = tuple[int, int]

#: Noncharacters: no text that is meant for exchange holds them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_marking: ContextVar[bool] = ContextVar("marking", default=False)

#: Names under which a message's thinking is found; templates read the first, some the second.
REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateFailure(Exception):
    """The template cannot render these messages; the text says why, for the user."""


@dataclass(frozen=True)
class ChatTemplate:
    """One template, or several by name (``default``, ``tool_use``).

    Attributes:
        origin: File it was read from.
        sources: Name -> Jinja text.
        tokens: Special tokens by name (``eos_token``), which templates see as variables.
        now: What ``strftime_now`` tells, fixed so that all renderings of a run agree.
    """

    origin: str
    sources: Mapping[str, str]
    tokens: Mapping[str, str] = field(default_factory=dict)
    now: datetime = field(default_factory=datetime.now)

    def digest(self) -> str:
        """Identifies the template and its variables, not the date."""
        content = json.dumps([dict(self.sources), dict(self.tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def source(self, tools: Sequence[Any] | None) -> str:
        """The text that applies, as transformers chooses it."""
        if tools is not None and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" not in self.sources:
            raise UserError(
                f"{self.origin} holds the chat templates {', '.join(self.sources)}, none of them "
                "'default'. Choose one with --chat-template FILE."
            )
        return self.sources["default"]

    def marks_generation(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template says itself what the assistant generates."""
        return bool(_GENERATION.search(self.source(tools)))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: As in ``apply_chat_template``; values None and thinking under other names are
                treated as there.
            tools: JSON schemas of functions.
            variables: Further variables of the template (``enable_thinking``).
            generation_prompt: Open an assistant turn at the end.

        Raises:
            TemplateFailure: The template refuses these messages or fails on them.
        """
        import jinja2

        compiled = _compile(self.source(tools), self.now)
        try:
            text: str = compiled.render(
                messages=[_prepared(message) for message in messages],
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=generation_prompt,
                **{**self.tokens, **(variables or {})},
            )
        except jinja2.TemplateError as error:
            raise TemplateFailure(
                f"the chat template {self.origin} fails on it: {error.message}"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateFailure(
                f"the chat template {self.origin} fails on it: {type(error).__name__}: {error}"
            ) from error
        return text

    def render_marked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """The text, and the character spans of its ``{% generation %}`` blocks, in order.

        Raises:
            TemplateFailure: As ``render``; or the marks cannot be told from the text.
        """
        plain = self.render(messages, tools, variables)
        if _MARKS.search(plain):
            raise TemplateFailure("it holds U+FDD0 or U+FDD1, which no text should")
        token = _marking.set(True)
        try:
            marked = self.render(messages, tools, variables)
        finally:
            _marking.reset(token)
        spans: list[Span] = []
        depth = at = last = 0
        begin = 0
        for match in _MARKS.finditer(marked):
            at += match.start() - last
            last = match.end()
            if match.group() == _OPEN:
                begin = at if depth == 0 else begin
                depth += 1
            else:
                depth -= 1
                if depth == 0:
                    spans.append((begin, at))
            if depth < 0:
                break
        if depth or _MARKS.sub("", marked) != plain:
            raise TemplateFailure(
                f"the chat template {self.origin} works on the text of its own generation blocks, "
                "so their place cannot be told"
            )
        return plain, spans


def load(model: str | Path, *, override: str | None = None) -> ChatTemplate | None:
    """The template of a model directory, or of ``--chat-template FILE``; None where there is none.

    ``chat_template.jinja`` goes before ``chat_template`` in ``tokenizer_config.json``, that before
    the older ``chat_template.json``; ``additional_chat_templates/NAME.jinja`` adds names.

    Raises:
        UserError: A file is missing, no JSON, or no valid Jinja.
    """
    folder = Path(model).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    config = read_json(folder / "tokenizer_config.json")
    named = {**read_json(folder / "special_tokens_map.json"), **config}
    tokens = {name: text for name in NAMED_TOKENS if (text := content_of(named.get(name)))}
    if override is not None:
        path = Path(override).expanduser()
        if not path.is_file():
            raise UserError(f"--chat-template {path} is no file.")
        return _checked(ChatTemplate(str(path), {"default": _text(path)}, tokens))
    sources: dict[str, str] = {}
    origin = folder / "chat_template.jinja"
    if origin.is_file():
        sources["default"] = _text(origin)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _text(path)
    if not sources:
        for origin in (folder / "tokenizer_config.json", folder / "chat_template.json"):
            given = read_json(origin).get("chat_template")
            if isinstance(given, str):
                sources = {"default": given}
            elif isinstance(given, list):
                sources = {entry["name"]: entry["template"] for entry in given}
            if sources:
                break
    return _checked(ChatTemplate(str(origin), sources, tokens)) if sources else None


def _checked(template: ChatTemplate) -> ChatTemplate:
    import jinja2

    for source in template.sources.values():
        try:
            _compile(source, template.now)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template {template.origin} is no valid Jinja (line {error.lineno}): "
                f"{error.message}."
            ) from error
    return template


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the chat template {path}: {error}.") from error


def _prepared(message: Message) -> dict[str, Any]:
    """A message as templates get it: no None values, thinking under the names they read."""
    prepared = {key: value for key, value in message.items() if value is not None}
    thinking = next((prepared[name] for name in REASONING if name in prepared), None)
    if thinking is not None:
        prepared.setdefault("thinking", thinking)
        prepared["reasoning_content"] = thinking
    return prepared


# ------------------------------------------------------------------------------- the environment


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=16)
def _compile(source: str, now: datetime) -> Any:
    environment = _environment()(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_extension(), "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.strftime
    environment.globals["namespace"] = _namespace()
    return environment.from_string(source)


@functools.cache
def _environment() -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment


@functools.cache
def _namespace() -> Any:
    import jinja2
    from jinja2.utils import Namespace

    def check(names: Any) -> None:
        for name in names:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")

    class Guarded(Namespace):
        """Templates cannot reach the attributes of the object itself."""

        def __init__(*args: Any, **values: Any) -> None:
            check(values)
            Namespace.__init__(*args, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            check([name])
            super().__setitem__(name, value)

    return Guarded


@functools.cache
def _generation_extension() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """``{% generation %}...{% endgeneration %}``: what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own protocol

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            block = nodes.CallBlock(self.call_method("_mark"), [], [], body)
            return block.set_lineno(line)

        def _mark(self, caller: Any) -> str:
            text: str = caller()
            return f"{_OPEN}{text}{_CLOSE}" if _marking.get() else text

    return Generation
