"""Plugin `carbon_sources`: carbon intensities from five providers on the network, each an entry point."""
