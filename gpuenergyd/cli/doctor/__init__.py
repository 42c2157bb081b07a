"""`gpuenergyd doctor`: diagnoses this host.

command     `doctor`: diagnoses this host
host_facts  what it looks up, changing nothing
"""
