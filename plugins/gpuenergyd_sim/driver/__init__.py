"""The driver of simulated GPUs: their model, the world file that processes share, and streams."""
