"""The daemon: accepts training processes, measures, applies plans, records; and starts its helper processes.

across_hosts   pipelines across hosts: this host's part, and planning for the whole pipeline
api            the HTTP API and the clock socket
app            starts everything in order, watches it, stops it
carbon         carbon in the daemon: values, forecasts, targets and budgets of jobs that follow the grid
gpus           GPUs as the daemon knows them: inventory, history and access
jobs           jobs: running their state machines, delivering plans and clocks, handing over on a restart
manual_leases  GPU leases held outside any job
periodic       periodic tasks on the event loop
ports          what a running job needs of the daemon around it
processes      the daemon's child processes: GPU worker, policy host, carbon fetcher
registration   registration: what training processes send, validated, and their sessions
runtime        the daemon as a process: sockets, peers, memory, log limits
settings       the administrator's settings, with default_config.toml
zeusd          the API of the Zeus project's daemon, for programs written for it
"""
