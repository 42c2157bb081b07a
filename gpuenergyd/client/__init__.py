"""Client inside a training process: standard library only, and never blocks or fails a step."""
