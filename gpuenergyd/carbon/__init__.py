"""Carbon intensities from the network: the fetcher process, its sources, and the file that the daemon reads.

sources       one module per provider, and the HTTP client
keys          API keys from files that only their owner can read
fetcher       the fetcher process: the only one with network access
fetched_file  file of fetched values between fetcher and daemon, validated on both sides
signal_file   hourly signals in CSV files
"""
