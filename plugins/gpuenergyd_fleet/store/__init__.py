"""A fleet's power data in the history database: its budget, hosts, leases, grid events and samples."""
