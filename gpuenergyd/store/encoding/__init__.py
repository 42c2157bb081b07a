"""Formats of binary columns."""
