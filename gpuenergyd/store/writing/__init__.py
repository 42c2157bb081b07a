"""The writer thread and how records become rows."""
