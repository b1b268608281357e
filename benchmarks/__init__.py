"""Measurements: each prints a table and writes JSON; the tables of the documentation are made from that JSON."""
