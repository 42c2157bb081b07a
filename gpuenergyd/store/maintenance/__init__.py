"""Maintenance of the history: compaction, retention, stored summaries, disk space."""
