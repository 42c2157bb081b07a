"""What builds, checks and releases the project; no part of the wheel."""
