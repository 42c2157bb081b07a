"""Release packages: `make package`.

build       wheel and sdist, reproducible
contents    bill of materials: dependencies with their versions and licences
debian      a Debian package with the daemon's services
audit       known vulnerabilities of the pinned dependencies
advisories  reads a copy of the PyPA's advisory database
__main__    builds everything into dist/
"""
