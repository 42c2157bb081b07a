"""The host: facts about it and a diagnosis."""
