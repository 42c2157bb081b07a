"""Pipelines and replicas that span hosts."""
