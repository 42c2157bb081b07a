"""GPU leases held outside any job.

administrator  clock locks and power limits of administrators
leases         leases of GPUs that no job holds, and their clock locks and power limits
"""
