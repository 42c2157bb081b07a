"""Decisions for trainings across hosts, without I/O or a clock."""
