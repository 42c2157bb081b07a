"""Instruction times of a training process: the Protocol of timers, on the host's clock and from device events."""
