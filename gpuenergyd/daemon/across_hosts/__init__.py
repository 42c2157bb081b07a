"""Pipelines across hosts: members on this host, and planning by the leader for the whole pipeline."""
