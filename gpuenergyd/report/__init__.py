"""Reports on the history: tables, JSON, CSV and an HTML page.

carbon              emissions and carbon savings of a job
charts              charts of the HTML page, as inline SVG
csv_table           jobs and groups as CSV
energy_use          measured and estimated energy, unmeasured time and cost
formatting          numbers with units as text
groups              energy by user, tag, host, GPU or day
job                 the report data of one job
observed_iteration  one measured iteration and its critical path
page                the HTML page
tariff              electricity prices by hour and weekday
terminal            reports and the live view in a terminal
"""
