"""Building blocks for machines without Transformer Engine: CPUs and GPUs alike."""
