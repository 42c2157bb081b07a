"""Virtual time: a process whose threads, sleeps, locks and sockets use a clock that jumps to the next event."""
