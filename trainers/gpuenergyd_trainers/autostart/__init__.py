"""Joins programs that were not changed: `gpuenergyd run -- torchrun train.py` puts a hook into each Python it starts.

launching   the environment that makes a program's Pythons run the hook
hook        the folder with the sitecustomize.py that they run, before the program
watching    tells when a module that somebody waits for has been imported
joining     what is changed in a framework so that its pipelines and trainers join

Nothing is written anywhere and no framework is imported: a program started without the command, or by a Python that
takes no notice of its environment (`-I`, `-E`, `-S`), runs as ever.
"""
