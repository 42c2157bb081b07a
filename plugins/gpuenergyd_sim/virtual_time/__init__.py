"""Virtual time: a process whose threads, sleeps, locks and sockets live on a clock that jumps to the next event."""
