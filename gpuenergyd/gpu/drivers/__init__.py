"""GPU drivers: NVML and the simulated one."""
