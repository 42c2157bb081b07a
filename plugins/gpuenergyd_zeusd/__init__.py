"""The HTTP API of zeusd, the daemon of the Zeus project, for programs written for it."""
