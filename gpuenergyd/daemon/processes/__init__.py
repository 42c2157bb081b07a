"""Helper processes of the daemon (GPU worker and policy hosts), and the daemon's clients for them."""
