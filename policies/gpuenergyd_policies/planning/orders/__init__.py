"""Choice of the order of instructions together with the clocks, under a memory limit per rank.

- `shape`: the family of orders that is searched, each described by a few numbers per rank.
- `relaxation`: the least energy of one order.
- `search`: the search over orders.
"""
