"""The daemon: accepts training processes, measures, applies plans, records; and starts its helper processes.

across_hosts   pipelines across hosts: members on this host, and planning by the leader
api            the HTTP API and the clock socket
app            composition root: starts, supervises and stops the components
carbon         carbon in the daemon: values, forecasts, targets and budgets of jobs that follow the grid
gpus           GPUs as the daemon knows them: inventory, history and access
handover       hand-over of running jobs to the next daemon
jobs           jobs: state machines, delivery of plans and clocks
manual_leases  GPU leases held outside any job
periodic       periodic tasks on the event loop
ports          protocols of the services of a job and of its command executor
processes      the daemon's child processes: GPU worker, policy host, carbon fetcher
registration   validation of registrations and iteration reports
runtime        the daemon as a process: sockets, peers, memory, log limits
settings       the administrator's settings, with default_config.toml
zeusd          the API of the Zeus project's daemon, for programs written for it
"""
