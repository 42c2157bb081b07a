"""Pipelines and replicas that span hosts.

job_store      the training job's own TCPStore
local_daemon   requests to this host's daemon that never raise
pipeline_rank  one rank of a pipeline across hosts
replica_paces  replicas exchange their own iteration times
store_thread   a thread that uses a store which may hang
"""
