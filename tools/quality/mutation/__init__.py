"""Mutation testing: the share of small wrong changes that the tests detect."""
