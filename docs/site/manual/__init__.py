"""Manual pages and reference texts, generated from the command line and the settings."""
