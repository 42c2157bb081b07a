"""Adapters for training programs: one module per framework, with `attach(object, job=...) -> Handle`."""
