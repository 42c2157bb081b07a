"""Helper processes of the daemon: GPU worker and policy hosts, and the daemon's clients of them.

carbon_queries   requests for forecasts, timing values and targets, and their evaluation in the policy host
gpu_worker       supervision of the GPU worker and the daemon's interface to it
launch           starting helper processes as children or connecting to their systemd units
plugins          installed policies, found by entry point
policy_client    requests to the policy host, with a time limit
policy_host      main program of the process that runs policies
policy_unit      main program of the policy host's systemd unit
restart_backoff  delay before a lost process is restarted
view_delta       incremental encoding of a job's view for the policy host
worker_unit      main program of the GPU worker's systemd unit
"""
