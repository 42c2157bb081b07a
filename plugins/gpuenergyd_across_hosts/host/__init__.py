"""Pipelines across hosts in the daemon: members on this host, and planning by the leader for the whole pipeline."""
