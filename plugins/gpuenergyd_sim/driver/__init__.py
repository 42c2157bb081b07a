"""The driver of simulated GPUs: their model, the world file shared by processes, and streams."""
