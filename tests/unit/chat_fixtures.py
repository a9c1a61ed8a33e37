"""A small real tokenizer with the special tokens that the chat templates of the fixtures write."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import text_fixtures

TEMPLATES = Path(__file__).resolve().parents[1] / "fixtures" / "chat_templates"
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip
#: Added but not special, as DeepSeek's role tokens are.
ADDED = ["<|user|>", "<|assistant|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@functools.cache
def _tokenizer() -> str:
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(text_fixtures.QWEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Cuts spaces off the positions it tells, as Llama 3's and GPT-2's do.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text_fixtures.corpus(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer.to_str()


def model(folder: Path, template: str | None, **config: Any) -> Path:
    """A model directory: tokenizer, its config, and the fixture template of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer(), encoding="utf-8")
    tokens = {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "</s>", **config}
    tokens = {key: value for key, value in tokens.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens}), encoding="utf-8"
    )
    if template is not None:
        text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    return folder


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
