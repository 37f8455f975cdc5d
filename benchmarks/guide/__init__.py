"""Many seeds of each rule, each at its own best learning rate, and what they say as pairs.

    python -m benchmarks.guide --minutes 60      # goes on where the last call stopped
    python -m benchmarks.guide --table           # what benchmarks/results/guide.csv says so far

Learning rates are tuned for each method on two seeds that no result uses; then twenty seeds run,
one by one. Runs of one seed begin with the same weights and see the same batches, and are
compared as pairs. What is judged is free of the trouble: held-out data without noise.
"""
