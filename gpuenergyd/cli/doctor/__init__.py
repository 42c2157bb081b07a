"""`gpuenergyd doctor`: diagnose this host and suggest fixes.

command     the command and its output
host_facts  collects facts about the host, read-only
"""
