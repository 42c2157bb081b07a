"""Makes the site: `python -m docs.site`, or `make docs`.

build         pages and what is generated, through Sphinx, into static HTML
markdown      tables and code in Markdown
commands      the command line, from itself
settings      every setting, from the file that `gpuenergyd install` writes
http_api      what the socket serves, from the description it serves
metrics       what Prometheus sees, from the collector
entry_points  where plugins hook in, from what is installed
python_api    public names with their docstrings, from the sources
pictures      pipelines and frontiers, drawn from the planner's own answers
"""
