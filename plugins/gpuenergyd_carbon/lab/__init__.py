"""Replays of past traces: what carbon timing would have saved."""
