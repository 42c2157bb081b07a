"""Rules of the slowdown budget and of time, without I/O."""
