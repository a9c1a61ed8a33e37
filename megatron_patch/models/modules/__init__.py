"""Modules that upstream lacks, and changes to built ones. Imported when a model is built."""
