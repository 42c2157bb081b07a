"""The link between the daemon and the GPU worker."""
