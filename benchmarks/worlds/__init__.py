"""What only benchmarks run in or compare with: jobs whose truth is known, lower bounds, layouts of real frameworks."""
