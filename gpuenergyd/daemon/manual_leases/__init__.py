"""GPU leases held outside any job."""
