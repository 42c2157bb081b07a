"""Operating system services of the daemon process: sockets, client identity, memory, suspend detection, log limits."""
