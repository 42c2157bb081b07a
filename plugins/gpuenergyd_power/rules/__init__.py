"""Rules of a host's power: its budget, the backstop that measures, learned excess, and limits of ramps. No I/O."""
