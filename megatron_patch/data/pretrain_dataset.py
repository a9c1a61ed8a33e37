"""Token streams (`.bin/.idx`) for pretraining, through upstream's `GPTDataset`."""

from __future__ import annotations

import bisect
import functools
import itertools
import multiprocessing
import os
import secrets
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_patch.util import UserError


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
    model_config = core_transformer_config_from_args(args)

    def on_this_rank() -> bool:
        # Only TP rank 0 of stages that read tokens or labels; the others get a broadcast.
        return mpu.get_tensor_model_parallel_rank() == 0 and needs_batch(model_config, vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    config, sizes = wanted(args, train_val_test_num_samples)
    if VALIDATION:
        args.consumed_valid_samples = 0  # each evaluation reads the same
    index_on_each_node(config, sizes)
    built = list(BlendedMegatronDatasetBuilder(kind, sizes, on_this_rank, config).build())
    if built[0] is not None:
        _TRAINING[:] = [built[0]]
    if VALIDATION:
        sets = built[1] if isinstance(built[1], list) else [built[1]]
        steps = [n * args.eval_global_batch_size for _, n in VALIDATION]
        built[1] = None if sets[0] is None else ValidationSets(sets, steps)
    return built[0], built[1], built[2]


def wanted(args: Namespace, samples: list[int]) -> tuple[Any, list[int]]:
    """Upstream's configuration of the data, and sequences of each split.

    Args:
        args: validated arguments.
        samples: what upstream asks for.
    """
    sizes = [getattr(args, "planned_train_samples", None) or samples[0], *samples[1:]]
    config = dataset_config(args)
    VALIDATION[:] = _validation(args, config) if args.validation_sets else []
    if VALIDATION:
        config.multiple_validation_sets = True
        sizes[1] = args.eval_global_batch_size * max(steps for _, steps in VALIDATION)
    return config, sizes


#: Names of the validation sets with a loss each, and steps of an evaluation of each.
VALIDATION: list[tuple[str, int]] = []


class ValidationSets:
    """The first sequences of several sets, one set after the other, over and over.

    Upstream's loader reads it as one validation set; `training/metrics.py` takes it apart again.

    Args:
        sets: data sets.
        sizes: sequences of each that an evaluation reads.
    """

    def __init__(self, sets: list[Any], sizes: list[int]) -> None:
        from megatron.core.datasets.utils import Split

        self._sets, self._ends = sets, list(itertools.accumulate(sizes))
        self.index_split = Split.valid

    def __len__(self) -> int:
        return 1 << 60

    def __getitem__(self, index: int) -> Any:
        at = index % self._ends[-1]
        number = bisect.bisect_right(self._ends, at)
        return self._sets[number][at - (self._ends[number - 1] if number else 0)]


def _validation(args: Namespace, config: Any) -> list[tuple[str, int]]:
    """Steps that each named set is evaluated for: no more than one pass over it.

    Rank 0 looks, for all.
    """
    import torch

    from megatron_patch.data.blend import epoch_samples

    box: list[Any] = [None]
    ranks = torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_rank() == 0:
        prefixes = config.blend_per_split[1][0]
        box[0] = []
        for name, prefix in zip(args.validation_sets, prefixes, strict=True):
            steps = -(-epoch_samples(prefix, args.seq_length) // args.eval_global_batch_size)
            most = steps if args.validation_whole else min(args.eval_iters, steps)
            box[0].append((name, max(1, most)))
    if ranks:
        torch.distributed.broadcast_object_list(box, src=0)
    return list(box[0])


# --- nodes with caches of their own -------------------------------------------------------------


def who_sees(folder: str) -> list[bool]:
    """Whether each rank sees in a directory what rank 0 writes there; all have to call it."""
    import torch

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    box: list[Any] = [f".seen-{secrets.token_hex(8)}"]
    torch.distributed.broadcast_object_list(box, src=0)
    mark = os.path.join(folder, box[0])
    if rank == 0:
        os.makedirs(folder, exist_ok=True)
        open(mark, "wb").close()
    torch.distributed.barrier()
    for pause in (0.0, 0.5, 1.0, 2.0):  # network file systems remember what was not there
        time.sleep(pause)
        if os.path.exists(mark):
            break
    sees: list[Any] = [None] * world
    torch.distributed.all_gather_object(sees, os.path.exists(mark))
    if rank == 0:
        os.unlink(mark)
    return sees


def index_on_each_node(config: Any, wanted: list[int]) -> None:
    """Build the index on every node that does not see the cache of rank 0.

    Upstream builds it on global rank 0, and every other rank expects to find it.

    Args:
        config: upstream's `GPTDatasetConfig`.
        wanted: sequences of each split.

    Raises:
        UserError: it could not be built on a node; on all ranks.
    """
    import torch

    world, local = torch.distributed.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    folder = config.path_to_cache
    if folder is None or config.mock or not 0 < local < world:
        return
    rank = torch.distributed.get_rank()
    sees = who_sees(folder)
    if all(sees):
        return
    problem = None
    if not sees[rank] and int(os.environ.get("LOCAL_RANK", "0")) == 0:
        # In a process of its own, which is no rank: there upstream builds whatever is missing.
        child = multiprocessing.get_context("spawn").Process(
            target=build_index, args=(config, wanted)
        )
        child.start()
        child.join()
        if child.exitcode:
            problem = f"{socket.gethostname()}: the data's index could not be built in {folder}"
    problems: list[Any] = [None] * world
    torch.distributed.all_gather_object(problems, problem)
    found = sorted({text for text in problems if text})
    if found:
        raise UserError(
            f"{'; '.join(found)} (its log says why). Give a --data-cache-path that each node can "
            "write to, or one that all nodes see"
        )
    if rank == 0:
        count = sum(not seen for seen in sees) // local
        print(f"> {folder} is not shared: {count} more nodes built the index of their own")


def build_index(config: Any, wanted: list[int]) -> None:
    """Build what is missing, in a process that is no rank."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset

    BlendedMegatronDatasetBuilder(GPTDataset, wanted, lambda: True, config).build()


#: The training data as this process reads it.
_TRAINING: list[Any] = []


def naming(number: int) -> Callable[[], str]:
    """Says, if asked, which sequences are in this rank's micro-batch of the step under way.

    Args:
        number: of the micro-batch in the step, from 0.
    """
    from megatron.training import get_args

    return functools.partial(_name, get_args().consumed_train_samples, number)


def _name(consumed: int, number: int) -> str:
    """The sequences of a micro-batch; see upstream's `MegatronPretrainingSampler`."""
    from megatron.core import mpu
    from megatron.training import get_args

    args = get_args()
    size, replicas = args.micro_batch_size, mpu.get_data_parallel_world_size()
    first = consumed + (number * replicas + mpu.get_data_parallel_rank()) * size
    if args.dataloader_type != "single":
        return f"micro-batch {number} (--dataloader-type {args.dataloader_type}: in no fixed order)"
    return "; ".join(f"sequence {i}{_place(i)}" for i in range(first, first + size))


def _place(index: int) -> str:
    """Where a sequence of the run's order comes from: data set and documents."""
    data = _TRAINING[-1] if _TRAINING else None
    if data is None:
        return ""
    if hasattr(data, "dataset_sample_index"):  # a blend
        part = data.datasets[int(data.dataset_index[index])]
        data, index = part, int(data.dataset_sample_index[index])
    try:
        at = int(data.shuffle_index[index])
        (first, offset), (last, end) = (map(int, data.sample_index[at + i]) for i in (0, 1))
        documents = [int(d) for d in data.document_index[first : last + (end > 0)]]
        prefix = data.dataset.path_prefix
    except (AttributeError, IndexError, TypeError):
        return ""  # mock data has no documents
    shown = ", ".join(map(str, documents[:4])) + (", ..." if len(documents) > 4 else "")
    return f" ({prefix}, document {shown} from token {offset})"
