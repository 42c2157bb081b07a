"""Reports on the history: tables, JSON, CSV and one HTML page.

carbon         a job's emissions and what was saved
charts         charts of the HTML report, as inline SVG
critical_path  the observed critical path of an iteration
csv_table      jobs and groups as CSV
energy_use     energy measured, estimated and missing, and its cost
formatting     numbers and units as text
groups         energy by user, tag, host, GPU or day
job            everything a report shows of one job
page           the HTML page
tariff         electricity prices by hour
terminal       reports and the live view for a terminal
"""
