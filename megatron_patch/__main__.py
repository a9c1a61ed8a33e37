"""``python -m megatron_patch`` is ``megatron-patch``."""

from megatron_patch.cli import run

if __name__ == "__main__":
    run()
