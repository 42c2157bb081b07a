"""Carbon intensities from the network: the fetcher process, its sources, and the file that the daemon reads."""
