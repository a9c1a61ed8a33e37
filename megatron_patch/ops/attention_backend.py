"""Which kernel computes attention: named in the log, and why, where it is none of the fast ones.

What runs is asked of whoever decides, when a layer of each kind is called for the first time:
Transformer Engine's own record of its decision, or torch's choice for the very tensors. Nothing is
worked out a second time here, so the name cannot drift from what runs.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_patch.util import UserError

#: `--attention-backend` -> what torch may use for it.
_ALLOWED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
}
_NAMES = {
    SDPBackend.FLASH_ATTENTION: "SDPA flash",
    SDPBackend.EFFICIENT_ATTENTION: "SDPA memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "SDPA cuDNN",
    SDPBackend.MATH: "SDPA unfused (math)",
}
#: In the name of every kernel that holds all scores of a head in memory.
UNFUSED = "unfused"


# --- torch --------------------------------------------------------------------------------------


def asked_of_torch(config: Any) -> SDPBackend | None:
    """The one backend that ``--attention-backend`` leaves torch; None for its own choice.

    Args:
        config: a `TransformerConfig`.
    """
    return _ALLOWED.get(getattr(config.attention_backend, "name", ""))


def only(backend: SDPBackend | None) -> contextlib.AbstractContextManager[Any]:
    """Inside it torch takes this backend or refuses; None: as ever."""
    return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)


def torch_kernel(call: Mapping[str, Any]) -> str | None:
    """What torch runs for a call of `scaled_dot_product_attention`; None where nothing can.

    Args:
        call: its arguments by name.
    """
    q, k, v, bias = (call[n] for n in ("query", "key", "value", "attn_mask"))
    options = call["dropout_p"], call["is_causal"]
    if bias is not None and hasattr(bias, "variant"):
        # A causal bias: torch takes the fast kernels itself, or writes out the mask.
        params = torch.backends.cuda.SDPAParams(q, k, v, None, *options, call["enable_gqa"])
        if q.is_cuda and torch.backends.cuda.can_use_flash_attention(params):
            return _NAMES[SDPBackend.FLASH_ATTENTION]
        if q.is_cuda and torch.backends.cuda.can_use_efficient_attention(params):
            return _NAMES[SDPBackend.EFFICIENT_ATTENTION]
        bias = bias._materialize(q.device)
    more = {"scale": call["scale"], "enable_gqa": call["enable_gqa"]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            number = torch._fused_sdp_choice(q, k, v, bias, *options, **more)
    except RuntimeError:
        return None
    return _NAMES.get(SDPBackend(number))


def torch_reasons(call: Mapping[str, Any]) -> list[str]:
    """Why torch takes no fused kernel for a call, in its words; nothing on CPU, which tells none.

    Args:
        call: as for `torch_kernel`.
    """
    q, k, v = (call[n] for n in ("query", "key", "value"))
    if not q.is_cuda:
        return []
    params = torch.backends.cuda.SDPAParams(
        q, k, v, call["attn_mask"], call["dropout_p"], call["is_causal"], call["enable_gqa"]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ask in ("flash", "efficient", "cudnn"):
            getattr(torch.backends.cuda, f"can_use_{ask}_attention")(params, True)
    said = [str(w.message).partition(" (Triggered")[0].strip() for w in caught]
    return list(dict.fromkeys(said))


# --- Transformer Engine ---------------------------------------------------------------------------


def _decisions() -> dict[str, Any]:
    """Transformer Engine's record of its last decision."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    found: dict[str, Any] = _attention_backends
    return found


def te_kernel() -> str | None:
    """What Transformer Engine's attention ran last; None where it had nothing."""
    made = _decisions()
    if made.get("use_flash_attention"):
        return f"FlashAttention {made['flash_attention_backend']}"
    if made.get("use_fused_attention"):
        return f"cuDNN {_cudnn()}fused attention ({_sub_backend(made['fused_attention_backend'])})"
    if made.get("use_unfused_attention"):
        return f"{UNFUSED} attention of Transformer Engine"
    return None


def _cudnn() -> str:
    try:
        from transformer_engine.pytorch.utils import get_cudnn_version

        return ".".join(map(str, get_cudnn_version())) + " "
    except (ImportError, RuntimeError):
        return ""


def _sub_backend(value: Any) -> str:
    try:
        from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

        return {"F16_arbitrary_seqlen": "16 bit"}.get(*[FusedAttnBackend(int(value)).name] * 2)
    except (ImportError, ValueError, TypeError):
        return f"sub-backend {value}"


def te_reasons() -> list[str]:
    """Why Transformer Engine takes no fused kernel: its decision once more, listened to."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    params = _decisions().get("attention_params")
    if params is None:
        return []
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno <= logging.WARNING and "Disabling" in record.getMessage():
                said.append(record.getMessage().strip().splitlines()[0])

    logger, listener = logging.getLogger("DotProductAttention"), Listener()
    before = utils.AttentionLogging._log_level, logger.propagate, logger.handlers[:]
    utils.AttentionLogging._log_level, logger.propagate = logging.DEBUG, False
    logger.handlers = [listener]
    try:
        utils.get_attention_backend(params)
    finally:
        utils.AttentionLogging._log_level, logger.propagate, logger.handlers = before
        logger.setLevel(before[0])
    return list(dict.fromkeys(said))


def without_wrong_flash_attention_4(asked: str, say: Callable[[str], None]) -> None:
    """Take FlashAttention 4 from Transformer Engine where the two disagree about windows.

    Transformer Engine says "causal" as a window of (-1, 0). Releases of flash-attn-4 after the one
    that it names (4.0.0b36 on an H200) take the -1 for a width: no query sees any key before its
    own block, the loss falls more slowly, and nothing is said.

    Args:
        asked: `--attention-backend`.
        say: gets a line where it was taken away.

    Raises:
        UserError: it is the only FlashAttention, and one was asked for.
    """
    try:
        from transformer_engine.pytorch.attention.dot_product_attention import utils

        found = utils.FlashAttentionUtils
        if not found.v4_is_installed:
            return
        # Transformer Engine imported it, where it calls it.
        resolve = sys.modules["flash_attn.cute.interface"]._resolve_causal_local_window
    except (ImportError, AttributeError, KeyError):
        return
    _, local, *_ = resolve(True, -1, 0)
    if not local:
        return
    what = (
        f"flash-attn-4 {found.fa4_version} reads Transformer Engine's causal mask as a window of "
        "-1 tokens, so that attention would see almost nothing"
    )
    if asked == "flash" and not (found.is_installed or found.v3_is_installed):
        how = " ".join(found.v4_installation_steps.split())
        raise UserError(
            f"--attention-backend flash: {what}. Leave the flag out (cuDNN), or install what this "
            f"Transformer Engine was made for: {how}"
        )
    found.v4_is_installed = False
    say(f"{what}: it is left out")


# --- both -----------------------------------------------------------------------------------------


def cannot(asked: str, reasons: Sequence[str]) -> UserError:
    """The refusal of a backend that was asked for, or of all of them."""
    why = f": {'; '.join(reasons)}" if reasons else ""
    chosen = "no backend" if asked == "auto" else f"--attention-backend {asked}"
    if asked != "auto":
        return UserError(f"{chosen} cannot run this model's attention{why}. Leave the flag out")
    return UserError(f"{chosen} can run this model's attention{why}")


def _kinds(stages: Sequence[Any]) -> Iterator[tuple[str, Any, int]]:
    """(kind, core attention, layer) of every layer that has one."""
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
    from megatron.core.transformer.utils import is_layer_window_attention

    for stage in stages:
        for name, module in stage.named_modules():
            if not name.endswith(".core_attention"):
                continue
            attention = stage.get_submodule(name.rpartition(".")[0])
            config, number = attention.config, attention.layer_number
            kind = "attention"
            if isinstance(attention, MultiLatentAttention):
                kind = "latent attention"
            if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number):
                kind += f", window {config.window_size[0]}"
            if ".mtp" in f".{name}":
                kind += ", multi-token prediction"
            yield kind, module, number


def _linear(stages: Sequence[Any]) -> Iterator[str]:
    """A line for layers that have no core attention."""
    layers = [
        module
        for stage in stages
        for module in stage.modules()
        if type(module).__name__ == "GatedDeltaNet"
    ]
    if layers:
        by = "torch" if layers[0].config.deterministic_mode else "flash-linear-attention's kernels"
        yield f"Gated DeltaNet, {len(layers)} layers: {by}"


def watch(stages: Sequence[Any], say: Callable[[str], None]) -> None:
    """Name each kind of layer's kernel at its first call.

    Args:
        stages: this rank's model chunks, before they are wrapped.
        say: gets a line for each kind of layer.
    """
    kinds: dict[str, list[Any]] = {}
    for kind, module, _ in _kinds(stages):
        kinds.setdefault(kind, []).append(module)
    for line in _linear(stages):
        say(line)
    modules = [module for modules in kinds.values() for module in modules]
    if any(not hasattr(module, "kernel") for module in modules):
        without_wrong_flash_attention_4(modules[0].config.attention_backend.name, say)
    for kind, modules in kinds.items():
        _watch(modules[0], f"{kind}, {len(modules)} layers", say)


def _watch(module: Any, what: str, say: Callable[[str], None]) -> None:
    """Report the first call of a core attention; later ones go where they would have gone."""
    plain = module.forward
    asked = module.config.attention_backend.name

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = hasattr(module, "kernel")  # this library's
        try:
            out = plain(*args, **kwargs)
        except ValueError as problem:
            if own or te_kernel() is not None or "backend" not in str(problem):
                raise
            raise cannot(asked, te_reasons()) from problem
        del module.forward  # an attribute of this module, in front of its class's
        kernel = module.kernel if own else te_kernel()
        if kernel is None:
            say(f"{what}: a kernel that could not be named")
            return out
        say(f"{what}: {kernel}")
        if UNFUSED in kernel and asked not in (UNFUSED, "local") and torch.cuda.is_available():
            reasons = module.reasons if own else te_reasons()
            why = f" ({'; '.join(reasons)})" if reasons else ""
            say(
                f"warning: {what}: {kernel} holds every score in memory and is several times "
                f"slower than a fused kernel{why}"
            )
        return out

    module.forward = forward
