"""How adapters attach to a framework.

handle        what `attach` returns
ordered_rank  a rank whose instruction order is learned and checked
wrapping      methods wrapped on one object, and undone
"""
