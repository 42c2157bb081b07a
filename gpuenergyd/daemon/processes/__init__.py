"""The daemon's child processes: GPU worker, policy host, carbon fetcher.

carbon_queries   forecasts and targets, asked of the policy host
gpu_worker       starts, watches and replaces the GPU worker
launch           starts child processes or connects to their units
plugins          installed policies, by entry point
policy_client    asks the policy host, with a time limit
policy_host      the process that policies run in
policy_unit      the policy host as a systemd unit
restart_backoff  restart backoff for child processes
view_delta       sends a policy only what changed in a job's view
worker_unit      the GPU worker as a systemd unit
"""
