"""The daemon as a process: sockets, peers, memory, log limits.

listening         unix sockets to listen on
log_rate_limit    a rate limit per kind of log line
memory            one malloc arena for all threads
pauses            short pauses of the event loop
peer_credentials  the process at the other end of a Unix socket
sleep_watch       detects that the host was suspended
"""
