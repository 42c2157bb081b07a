"""Formats of profiles, planner instances and orders, read from files."""
