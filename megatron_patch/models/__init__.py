"""Model families: one file per HF ``model_type``, each holding a `ModelFamily` and nothing else."""
