"""Where carbon intensities come from: the only part that asks the network, and the file it leaves for the core.

sources       one module per provider, and the one that speaks HTTP
keys          secrets from files that only their owner can read
fetcher       the process of its own that asks, waits and writes
fetched_file  what the fetcher writes and the core reads, checked on both sides
signal_file   any hourly signal in a CSV file
"""
