"""Operating system services of the daemon process: sockets, client identity, memory, suspend detection, log limits.

listening         listening Unix sockets and the lock against a second daemon
log_rate_limit    a rate limit per kind of log line
peer_credentials  identity of the process at the other end of a Unix socket
process_tuning    garbage collection pauses and malloc arenas
sleep_watch       detection of a suspended host
"""
