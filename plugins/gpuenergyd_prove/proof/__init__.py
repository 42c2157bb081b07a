"""A proof's claim, raw data and verdict, without I/O; `verdict` computes the conclusion from the raw data."""
