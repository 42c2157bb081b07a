"""The documents, and the programs that generate parts of them and the site."""
