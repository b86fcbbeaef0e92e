"""Checks of a finished checkpoint, made before it is published."""
