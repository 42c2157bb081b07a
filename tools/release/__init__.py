"""What a release consists of: `make package`.

build       wheel and sdist, the same bytes from the same commit
contents    what is in them beside our own code: the dependencies with their licences
debian      a Debian package of the daemon as services
__main__    all of it into dist/
"""
