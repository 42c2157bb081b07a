"""What a training program needs of gpuenergyd: standard library only."""

__version__ = "0.1.0"
