"""`gpuenergyd doctor`: diagnose this host and suggest fixes."""
