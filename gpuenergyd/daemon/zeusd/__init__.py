"""The HTTP API of zeusd, the daemon of the Zeus project, for programs written for it.

openapi     the OpenAPI description of these routes
parameters  parsing of zeusd's query parameters
requests    applying clock and power changes under one lease per process and GPU
routes      the request handlers
"""
