"""Jobs: running their state machines, delivering plans and clocks."""
