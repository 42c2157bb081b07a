"""Decisions on idle GPUs: pure functions of readings and time."""
