"""Runtime patches of upstream defects: one per file, each with the condition that retires it.

A file here defines ``PATCHES``, a tuple of :class:`~megatron_patch.patches.registry.Patch` records,
and imports neither torch nor megatron at its top. Nothing is applied by importing; an entry point
calls ``registry.apply()`` once.
"""
