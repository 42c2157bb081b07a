"""Mutation testing: the share of small wrong changes that the tests detect.

choice      which mutants are worth testing
places      all mutants of a file, from cosmic-ray's operators (a separate program)
sample      a seeded sample and the confidence interval of its score
watching    records which test runs which line and how long it takes (a pytest plugin)
workbench   applies mutants to a copy of the tree and runs tests on them
equivalent  mutants that no test can distinguish from the code, with the reason
"""
