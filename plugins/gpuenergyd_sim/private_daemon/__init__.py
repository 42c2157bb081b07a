"""A daemon of one's own: child processes that end with their parent, and their folder."""
