"""The HTTP API and the clock socket.

clock_socket      the datagram socket for clock requests inside an iteration
connection_guard  credentials, count and time limits of HTTP connections
fair_queue        fair per-user queueing of requests on the event loop
limits            request rate and connection limits per user
metrics           `GET /v1/metrics` for Prometheus
openapi           `GET /v1/openapi.json`
otlp              the metrics in OTLP for an OpenTelemetry collector
routes            the list of routes
server            handlers and error responses of the HTTP API
snapshots         caching of responses that are expensive to build
status            `GET /v1/status` and `GET /v1/jobs/{id}`
"""
