"""Measures for agents that consult a critic: data sets, metrics, runs and reports."""
