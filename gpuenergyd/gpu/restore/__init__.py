"""Restoring GPUs: the journal of original GPU states, and setting them again."""
