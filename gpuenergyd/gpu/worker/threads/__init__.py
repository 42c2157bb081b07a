"""The driver threads of the worker, and the computations on their readings."""
