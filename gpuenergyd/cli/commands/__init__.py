"""Commands that fit into a file or two each."""
