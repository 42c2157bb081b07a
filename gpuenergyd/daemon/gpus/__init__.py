"""GPUs of this host: identity, state, energy records, and the rights of processes to change them."""
