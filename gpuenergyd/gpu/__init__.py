"""GPUs: reading, controlling and restoring them."""
