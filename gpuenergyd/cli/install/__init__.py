"""`gpuenergyd install` and `gpuenergyd uninstall`."""
