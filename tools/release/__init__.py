"""Release packages: `make package`."""
