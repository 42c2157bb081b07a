"""Charts of the HTML report, as inline SVG.

axes              round steps, ticks with units, positions
carbon_intensity  carbon intensity and target over time
colours           SM clocks as colours
daily_energy      energy per day
iterations        time and energy of every iteration
power             measured and planned power over time
time_energy       time against energy
timeline          the pipeline before and after
"""
