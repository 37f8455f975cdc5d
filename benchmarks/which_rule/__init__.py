"""Which rule? Clipping rules against the troubles they are said to help with.

    python -m benchmarks.which_rule --out benchmarks/results    # all: half an hour on a core
    python -m benchmarks.which_rule --table                     # tables of the results there
    python -m benchmarks.which_rule --troubles "bad batches" --rules ZClip --out /tmp
    python -m benchmarks.which_rule --size large --device cuda --text book.txt --out /tmp

Every run is a trouble, an optimizer, a rule and a seed. Runs of one seed begin with the same
weights and see the same batches, whatever the rule. What is judged is free of the trouble:
held-out data without noise for the final loss, and clean batches for the spike score.
"""
