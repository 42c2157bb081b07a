"""One file per command.

dashboard         `dashboard`: a live page on this host
dashboard_server  its HTTP server
manual_leases     `lock` and `limit`
otlp              `otlp`: metrics to an OpenTelemetry collector
plain_arguments   `report` without Typer
policies          `policies`: installed policies
report            `report`: options
report_output     `report`: what it reads and prints
restore           `restore`: restores GPU clocks and power limits
run               `run`: starts a training program that joins by itself
serve             `serve`: runs the daemon
status            `status`: GPUs, jobs, plans and health
"""
