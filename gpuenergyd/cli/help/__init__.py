"""Help beyond `--help`: manual pages, settings, versions.

command_tree   every command with its options
manual_pages   `man gpuenergyd`
settings_text  every setting with its explanation
versions       `--version`
"""
