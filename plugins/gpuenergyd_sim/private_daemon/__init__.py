"""A private daemon, in child processes that end with their parent, and the folder for its files."""
