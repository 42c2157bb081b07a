"""How good the tests are: lines that they run, and small wrong changes that they notice."""
