"""`gpuenergyd.measure`: the energy of any code, without a job and without rights."""
