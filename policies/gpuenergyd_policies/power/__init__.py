"""Policies that divide a power budget among jobs."""
