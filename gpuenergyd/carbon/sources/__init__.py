"""Sources of carbon intensities, found by entry point in the group `gpuenergyd.carbon_sources`.

source             the Protocol, what a source is given and what it answers
web                HTTP with limits: the only module that imports requests
checking           values that a source may pass on; mix, intensities from a generation mix
neso               Great Britain, no key
electricity_maps   most of the world, one zone with a free key
watttime           marginal intensities
entsoe             Europe, from generation per plant type
eia                United States, from generation per fuel
fixed              one value, or a CSV file
"""
