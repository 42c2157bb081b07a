"""Shared test support: fakes, builders, virtual time, processes."""
