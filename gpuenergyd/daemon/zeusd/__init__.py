"""The API of the Zeus project's daemon, for programs written for it.

openapi     the OpenAPI description of these routes
parameters  query parameters as zeusd takes them
requests    its clients' requests: one lease per process and GPU
routes      the routes of the Zeus project's daemon
"""
