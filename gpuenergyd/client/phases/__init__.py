"""Phases of plain training loops: found with torch's hooks, learned, and marked as instructions of one rank."""
