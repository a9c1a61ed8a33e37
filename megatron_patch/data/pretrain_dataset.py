"""Token streams (`.bin/.idx`) for pretraining, through upstream's `GPTDataset`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def dataset_config(args: Namespace) -> Any:
    """Upstream's `GPTDatasetConfig` for validated arguments."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=_cache(args.data_cache_path, blend, blend_per_split),
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )


def _cache(folder: str | None, *blends: Any) -> str | None:
    """A folder of its own for the data as it is now.

    Upstream's cache is keyed by paths and settings: files replaced under the same name would be
    read in the order, and only as far, as the old ones were.

    Args:
        folder: where caches go, or None for upstream's default beside the data.
        blends: `(prefixes, weights)`, None, or lists of these.
    """
    import hashlib
    import os

    if folder is None:
        return None
    digest = hashlib.sha256()
    queue = list(blends)
    while queue:
        item = queue.pop(0)
        if isinstance(item, str) and os.path.exists(item + ".idx"):
            size = os.path.getsize(item + ".idx")
            digest.update(f"{item} {size} {os.path.getsize(item + '.bin')} ".encode())
            with open(item + ".idx", "rb") as index:
                digest.update(index.read(1 << 20))
                index.seek(max(0, size - (1 << 20)))
                digest.update(index.read())
        elif isinstance(item, list | tuple):
            queue.extend(item)
    return os.path.join(folder, digest.hexdigest()[:16])


def datasets_provider(
    train_val_test_num_samples: list[int], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Train, validation and test sets of the given sample counts.

    Args:
        train_val_test_num_samples: samples wanted of each.
        vp_stage: virtual pipeline stage, or None.
    """
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    from megatron_patch.training.batch import needs_batch

    args = get_args()
    planned = getattr(args, "planned_train_samples", None)
    wanted = [planned or train_val_test_num_samples[0], *train_val_test_num_samples[1:]]
    model_config = core_transformer_config_from_args(args)

    def on_this_rank() -> bool:
        # Only TP rank 0 of stages that read tokens or labels; the others get a broadcast.
        return mpu.get_tensor_model_parallel_rank() == 0 and needs_batch(model_config, vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, wanted, on_this_rank, dataset_config(args)).build()
