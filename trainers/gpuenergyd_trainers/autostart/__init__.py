"""Attachment of unmodified programs, as in `gpuenergyd run -- torchrun train.py`.

No file is written and no framework is imported. Programs that are started without the command, or by a Python that
ignores its environment (`-I`, `-E`, `-S`), are not affected.
"""
