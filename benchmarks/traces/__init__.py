"""Gradient norms of real trainings, and what rules would have done to them.

    python -m benchmarks.traces record --runs ppo    # train, into benchmarks/results/traces
    python -m benchmarks.traces judge                # from these, results/simulate.csv

docs/simulate.md has its tables and pictures from these files when the documentation is built.
"""
