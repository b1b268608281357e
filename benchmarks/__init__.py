"""Measurements: each prints a table and writes JSON, from which the documentation's tables are made."""
