"""Checkpoints on disk: read lazily, written atomically, loaded to be run."""
