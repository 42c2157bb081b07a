"""GPU leases held outside any job.

administrator  the administrator's locks and limits
leases         clocks and power limits held outside any job
"""
