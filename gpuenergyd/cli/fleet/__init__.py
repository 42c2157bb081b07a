"""`gpuenergyd fleet`: the power budget of many hosts, its coordinator, its hosts, and grid events."""
