"""Restores: the journal of original GPU states, and putting them into effect again."""
