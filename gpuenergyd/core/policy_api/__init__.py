"""The plugin API for policy authors: Protocols, views and targets."""
