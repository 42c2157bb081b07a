"""Policies: plugins that decide clocks and iteration time targets, found by entry point."""
