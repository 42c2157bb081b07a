"""Reports and the live view for a terminal."""
