"""Sources of carbon intensities, found by entry point in the group `gpuenergyd.carbon_sources`.

source             Protocol, options and replies of sources
web                HTTP client with limits: the only module that imports requests
checking           validation of the providers' values
mix                intensities from a generation mix
neso               Great Britain, no key
electricity_maps   most of the world, one zone with a free key
watttime           marginal intensities
entsoe             Europe, from generation per plant type
eia                United States, from generation per fuel
fixed              one value, or a CSV file
"""
