"""Rules for a host's power: its budget, the backstop on measured power, learned excess, and ramp limits. No I/O."""
