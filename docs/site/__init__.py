"""Builds the documentation site: `python -m docs.site`, or `make docs`.

build         combines written and generated pages and runs Sphinx
markdown      tables and code blocks in Markdown
commands      command-line reference, from Typer
settings      settings reference, from the default configuration file
http_api      HTTP API reference, from the OpenAPI document
metrics       metrics reference, from the Prometheus collector
entry_points  entry point reference, from pyproject.toml
job_states    phases and transitions of a job, from its state machine
python_api    Python API reference, from the sources
pictures      pictures of pipelines and frontiers, from the planner's results
"""
