"""Decisions about a fleet's power budget: grid events, division among hosts, safe leases, and reports of events."""
