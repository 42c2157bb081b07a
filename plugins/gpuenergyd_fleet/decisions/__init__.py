"""The power budget of a fleet: grid events, its division among hosts, leases that are safe, and reports of events."""
