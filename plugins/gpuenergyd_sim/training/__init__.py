"""The demo's training program."""
