"""`gpuenergyd install` and `gpuenergyd uninstall`.

command       the two commands and their output
installation  plans and applies the file changes
"""
