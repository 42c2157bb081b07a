"""`gpuenergyd prove`: runs a pre-registered comparison, and checks one that somebody else has run."""
