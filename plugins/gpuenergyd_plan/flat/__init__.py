"""Plans whose power swings least, among those of nearly the least energy at equal time."""
