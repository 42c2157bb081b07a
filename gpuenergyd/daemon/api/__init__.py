"""The HTTP API and the clock socket.

clock_socket      the datagram socket for clock requests inside an iteration
connection_guard  identity, number and time limit of connections
fair_queue        fair per-user queueing of requests on the event loop
limits            request and connection limits per user
metrics           `GET /v1/metrics` for Prometheus
openapi           `GET /v1/openapi.json`
otlp              the metrics for an OpenTelemetry collector
server            HTTP with JSON on the Unix socket
snapshots         costly replies, shared for a moment
status            `GET /v1/status` and `GET /v1/jobs/{id}`
"""
