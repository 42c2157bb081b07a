"""Keeping the history bounded: compaction, retention, stored summaries, disk space.

advisory_locks  one host at a time creates tables or deletes old rows
compaction      iterations of long jobs become blocks
kept_summaries  summaries of ended jobs, computed once
retention       what is deleted, and when
space           disk space that the history takes and needs
"""
