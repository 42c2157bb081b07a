"""How many small wrong changes to the code do the tests notice?

choice      which changes are worth asking about
places      every mutant of a file, by cosmic-ray's operators (a program of its own)
sample      a seeded sample, and what its score says about all
watching    which test runs which line, and how long it takes (a plugin of pytest)
workbench   a copy of the tree, in which mutants are made and tests are asked
equivalent  mutants that no test can tell from the code, with the reason
"""
