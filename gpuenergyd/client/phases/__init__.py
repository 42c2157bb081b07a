"""Phases of plain training loops: found by torch's own hooks, learned, and marked as instructions of one rank."""
