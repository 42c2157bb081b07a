"""`gpuenergyd calibrate`: the command, and the load that it keeps on a GPU meanwhile."""
