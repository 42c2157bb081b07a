"""Plugin `command_driver`: reads GPUs through another driver, and changes them with an administrator's programs."""
