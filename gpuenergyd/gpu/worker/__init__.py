"""The GPU worker: the only privileged process, and the only one that changes GPUs."""
