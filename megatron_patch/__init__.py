"""Real open-weight models on pip-installed Megatron-Core, without touching a line of it.

Importing this package does nothing but name its version: no torch, no megatron, no patch.
"""

import sys

if sys.version_info < (3, 12):  # noqa: UP036  a checkout runs without pip's own check
    raise ImportError(
        "megatron_patch needs Python 3.12 or newer, as megatron-core 0.19 does; this is "
        + ".".join(map(str, sys.version_info[:3]))
    )

__version__ = "0.1.0"
