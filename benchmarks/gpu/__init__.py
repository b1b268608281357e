"""Measurements of a GPU machine: ``python -m benchmarks.gpu``. Each part is a module with ``run(settings, box)``."""
