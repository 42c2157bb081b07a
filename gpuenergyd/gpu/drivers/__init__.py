"""GPU drivers: NVML, and an administrator's commands."""
