"""Training on many GPUs: stragglers among replicas, and agreement on plans across hosts."""
