"""Manual pages and reference texts, generated from the command line and the settings.

command_tree   every command with its options
manual_pages   `man gpuenergyd`
settings_text  every setting with its explanation
"""
