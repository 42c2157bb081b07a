"""The power of a fleet in the history database: its budget, hosts, leases, grid events and samples."""
