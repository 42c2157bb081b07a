"""Plugin `formats`: reports of jobs as HTML pages, traces, SPDX documents and metadata of model cards."""
