"""Queries and job summaries."""
