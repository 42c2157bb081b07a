"""Sources of carbon intensities, found by entry point in the group `gpuenergyd.carbon_sources`."""
