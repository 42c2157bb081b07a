"""How many small wrong changes to the code do the tests notice?

places      every mutant of a file, by cosmic-ray's operators (a program of its own)
sample      a seeded sample, and what its score says about all
watching    which test runs which line, and how long it takes (a plugin of pytest)
asking      a mutant is put into a copy of the tree, and the tests that run its lines are asked
equivalent  mutants that no test can tell from the code, with the reason
"""
