"""Plugin `across_hosts`: trainings on several hosts, in the daemon of each host and in their processes."""
