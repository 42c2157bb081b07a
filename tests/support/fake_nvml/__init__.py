"""A libnvidia-ml.so.1 for tests: `library` compiles it, `control` injects faults into it."""
