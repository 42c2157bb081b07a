"""A GPU vendor in one folder: a driver with clocks, power caps and an energy counter, on a fake of its library."""
