"""Pipelines and replicas that span hosts.

job_store        the training job's own TCPStore
local_daemon     requests to this host's daemon that never raise
pipeline_leader  the leading rank of a pipeline across hosts
pipeline_member  one rank of a pipeline across hosts
pipeline_place   a rank's place in its pipeline, and its keys in the store
replica_paces    replicas exchange their own iteration times
store_thread     a thread that uses a store which may hang
"""
