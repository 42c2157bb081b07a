"""Training on many GPUs: stragglers among replicas, and plans that ranks on several hosts follow together.

pace               a replica's own iteration time at full speed
plan_windows       which plan all ranks follow in which iteration, across hosts
straggler_savings  measured saving of following a straggler's pace
stragglers         which replica slows the others down, and by how much
"""
