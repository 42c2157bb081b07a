"""Attachment of unmodified programs, as in `gpuenergyd run -- torchrun train.py`.

launching   the environment in which Python processes load the hook
hook        the folder with the hook, a sitecustomize.py that runs before the program
watching    an import hook for the modules of supported frameworks
joining     patches of frameworks so that their pipelines and trainers attach

No file is written and no framework is imported. Programs started without the command, or by a Python that ignores its
environment (`-I`, `-E`, `-S`), are not affected.
"""
