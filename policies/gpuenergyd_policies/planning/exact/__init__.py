"""The exact time-energy frontier: tables, flow network, sweep and certificate."""
