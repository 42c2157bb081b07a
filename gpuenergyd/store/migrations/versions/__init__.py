"""One file per revision, numbered; a revision never changes once released."""
