"""Pipelines across hosts: this host's part, and planning for the whole pipeline.

pipeline_leader  plans for a pipeline across hosts
pipeline_member  routes for a host's part of a pipeline across hosts
"""
