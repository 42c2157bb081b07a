"""Training on many GPUs: stragglers among replicas, and agreement on plans across hosts.

pace               iteration time of a replica at full speed and without waits
plan_windows       agreement of all ranks across hosts on the plan of each iteration
straggler_savings  measured saving of following a straggler's pace
stragglers         detection of the slowest replica and its pace
"""
