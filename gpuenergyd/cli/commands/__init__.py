"""Commands that fit into a file or two each.

dashboard         `dashboard`: a live page on 127.0.0.1
dashboard_server  its HTTP server
manual_leases     `lock` and `limit`: clock locks and power limits set by an administrator
otlp              `otlp`: export metrics to an OpenTelemetry collector
policies          `policies`: list installed plugins
report            `report`: options
report_arguments  fast path that parses the arguments of `report` without Typer
report_output     `report`: reads the history and writes the report
restore           `restore`: restore GPU clocks and power limits
run               `run`: start an unmodified training program under the daemon
serve             `serve`: run the daemon
status            `status`: GPUs, jobs, plans and health
"""
