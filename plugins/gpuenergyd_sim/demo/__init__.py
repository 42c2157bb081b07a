"""`gpuenergyd demo`: train a small GPT on simulated GPUs and report the saving."""
