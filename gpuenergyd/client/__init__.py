"""Client inside a training process: needs only the standard library, and never blocks or fails a training step."""
