"""`gpuenergyd install` and `uninstall`.

command       `install` and `uninstall`
installation  planned and applied file changes
"""
