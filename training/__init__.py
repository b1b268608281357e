"""The offline stage: thresholds, and later predictors and grouping. Scripts over small functions."""
