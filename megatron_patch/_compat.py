"""The one place that reads an upstream version or adapts a moved upstream call.

Nothing here imports torch or megatron at import time.
"""

from __future__ import annotations

from importlib import metadata

#: Inclusive lower and exclusive upper bound of the Megatron-Core line that is tested.
MEGATRON_CORE_MIN = "0.19.2"
MEGATRON_CORE_BELOW = "0.20"


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
