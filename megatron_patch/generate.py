"""Text from a checkpoint, Megatron's or Hugging Face's, by the Megatron model itself.

megatron-patch generate --load runs/mine --prompt "What do bees make?" --chat

One rank, float32, one text at a time, keys and values of earlier tokens kept: to look at what a run
has learned, and to compare with transformers token by token; serving is for other programs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.data import sft_store, template, text, tokenizers
from megatron_patch.data.tokenizers import TokenizerRequest
from megatron_patch.training.flags import OWN_FLAGS
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron_patch.models.family import ModelSpec


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-patch generate",
        description="Continue prompts with a checkpoint, without exporting it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--load", "--checkpoint", metavar="DIR", required=True,
        help="a Megatron checkpoint (a run directory, or a step of it) or a Hugging Face directory",
    )  # fmt: skip
    hf_model = next(flag for flag in OWN_FLAGS if flag.dest == "hf_model")
    parser.add_argument(
        hf_model.name, *hf_model.aliases, dest="hf_model", metavar="DIR",
        help="config.json and tokenizer, if they are not beside the checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="may be given again"
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's turn in the model's template"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system turn before it")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja file instead of the model's")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X",
        help="0 takes the most likely token (default); above, tokens are drawn",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    return parser


def main(argv: list[str]) -> int:
    """`megatron-patch generate`; returns the exit status."""
    args = _parser().parse_args(sft_store.dashed(argv))

    def run() -> None:
        for prompt, pieces in zip(args.prompt, generate(args), strict=True):
            print(prompt, end="\n\n" if args.chat else "", flush=True)
            for piece in pieces:
                print(piece, end="", flush=True)
            print("\n", flush=True)

    return text.guarded(run)


def generate(args: argparse.Namespace) -> Iterator[Iterator[str]]:
    """For each prompt its continuation, piece by piece."""
    import torch

    from megatron_patch.convert import one_rank, plan
    from megatron_patch.training.run import quiet

    quiet()
    if args.max_new_tokens < 1 or args.temperature < 0:
        raise UserError("--max-new-tokens is at least 1, and --temperature at least 0")
    folder, is_hf = _source(args)
    spec = plan.resolve(folder)
    tokenizer = tokenizers.load(TokenizerRequest("HuggingFaceTokenizer", str(folder)))
    engine: Any = tokenizer.reference
    prompts = [_ids(args, folder, engine.tokenizer, prompt) for prompt in args.prompt]
    ends = _ends(folder)
    longest = spec.args["max_position_embeddings"]
    # Megatron announces itself and its process groups.
    with contextlib.ExitStack() as stack:
        with contextlib.redirect_stdout(io.StringIO()):
            stack.enter_context(one_rank.one_rank())
            model = one_rank.build(spec)
            _fill(model, spec, args.load, folder, is_hf)
        device = next(model.parameters()).device
        for ids in prompts:
            draws = torch.Generator().manual_seed(args.seed)
            most = min(args.max_new_tokens, longest - len(ids))
            new = _continue(model, ids, ends, most, args.temperature, draws, device, spec)
            yield _pieces(engine.tokenizer, new)


def _source(args: argparse.Namespace) -> tuple[Path, bool]:
    """Directory with config and tokenizer, and whether the weights are there too."""
    from megatron_patch.convert import dist_io, plan

    load = Path(args.load)
    if (load / "config.json").exists() and any(load.glob("*.safetensors")):
        return load, True
    step = dist_io.find_checkpoint(load)
    return (Path(args.hf_model) if args.hf_model else plan.find_hf(step)), False


def _ids(args: argparse.Namespace, folder: Path, tokenizer: Any, prompt: str) -> list[int]:
    if not args.chat:
        return list(tokenizer.encode(prompt).ids)
    chat = template.load(folder, override=args.chat_template)
    if chat is None:
        raise UserError(f"--chat: {folder} has no chat template; give --chat-template FILE")
    messages = [{"role": "user", "content": prompt}]
    if args.system:
        messages.insert(0, {"role": "system", "content": args.system})
    try:
        whole = chat.render(messages, generation_prompt=True)
    except template.TemplateFailure as failure:
        raise UserError(f"--chat: {chat.origin}: {failure}") from failure
    return list(tokenizer.encode(whole, add_special_tokens=False).ids)


def _ends(folder: Path) -> set[int]:
    """Ids after which transformers stops too."""
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError):
            content = json.loads((folder / name).read_text())
            found = {**(content.get("text_config") or {}), **content}.get("eos_token_id")
            if found is not None:
                return set(found if isinstance(found, list) else [found])
    return set()


def _continue(
    model: Any,
    ids: Sequence[int],
    ends: set[int],
    most: int,
    temperature: float,
    draws: Any,
    device: Any,
    spec: ModelSpec,
) -> Iterator[int]:
    import torch

    from megatron_patch.convert import one_rank

    decode = one_rank.decoder(model, len(ids) + max(0, most))
    tokens = torch.tensor([list(ids)], device=device)
    for _ in range(most):
        last = decode(tokens)[: spec.true_vocab_size].cpu()
        if temperature:
            chosen = int(torch.multinomial((last / temperature).softmax(-1), 1, generator=draws))
        else:
            chosen = int(last.argmax())
        if chosen in ends:
            return
        yield chosen
        tokens = tokens.new_tensor([[chosen]])


def _pieces(tokenizer: Any, ids: Iterator[int]) -> Iterator[str]:
    """Text as it grows; half a character waits for its other half."""
    done: list[int] = []
    said = ""
    for new in ids:
        done.append(new)
        whole = tokenizer.decode(done)
        if not whole.endswith("�"):
            yield whole[len(said) :]
            said = whole
    rest = tokenizer.decode(done)[len(said) :]
    if rest:
        yield rest


# ------------------------------------------------------------------------------------------ weights


def _fill(model: Any, spec: ModelSpec, load: str, folder: Path, is_hf: bool) -> None:
    from megatron_patch.convert import load as direct
    from megatron_patch.convert import plan, verify

    if not is_hf:
        exported = plan.plan_export(load, folder)
        verify.fill(model, exported)
        _add_adapters(model, spec, load)
        return
    direct.load([model], plan.read_source(folder, spec))


def _add_adapters(model: Any, spec: ModelSpec, load: str) -> None:
    """Merge a run's adapters, if it trained any, into the model."""
    import torch

    from megatron_patch.convert import adapter, dist_io, layout
    from megatron_patch.patches.strict_load import ADAPTER
    from megatron_patch.training import lora

    step = dist_io.find_checkpoint(load)
    if not any(ADAPTER in key for key in dist_io.read_checkpoint(step).tensors):
        return
    record = step.parent.parent / "resolved_args.json"
    try:
        rank, alpha, *wanted = json.loads(record.read_text())["order"]["adapters"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{step} holds adapters, and {record}, which says how they are scaled, cannot be read"
        ) from error
    found = adapter.read(step, lora.places(spec, wanted))
    state = model.state_dict()
    with torch.no_grad():
        for rule in lora.targets(spec, wanted):
            parts = []
            for name, shape in zip(rule.hf, rule.shapes, strict=True):
                pair = found.get(name.removesuffix(".weight"))
                delta = torch.zeros(shape) if pair is None else pair[1].float() @ pair[0].float()
                parts.append(delta * (alpha / rank))
            state[layout.checkpoint_key(rule.name)].add_(rule.operation.forward(tuple(parts)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
