"""A libnvidia-ml.so.1 for tests: compiled by `library`, faults from `control`, its `nvidia-smi` in `nvidia_smi`."""
