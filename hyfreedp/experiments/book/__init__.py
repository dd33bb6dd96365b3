"""Notebooks as files: executing one or many, their parameters and exercises, and the report."""
