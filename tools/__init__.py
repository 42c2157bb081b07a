"""Programs that release the project and measure its tests; not part of the wheel."""
