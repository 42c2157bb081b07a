"""Plans under a power cap: the sum of all stages' power stays below it at every instant, in the least time."""
