"""Maintenance of the history: compaction, retention, stored summaries, disk space.

advisory_locks    PostgreSQL locks between the hosts that share a history
compaction        merges the iterations of long jobs into blocks
retention         deletes expired rows
space             watches free disk space and the size of the write-ahead log
stored_summaries  stores the summaries of ended jobs
"""
