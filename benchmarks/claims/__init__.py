"""Every sentence of the pages that compares methods, and what it rests on.

    python -m benchmarks.claims                # all of them; fails if one does not follow
    python -m benchmarks.claims papers.md      # those of a page

For each sentence it prints the comparisons: the seeds, the Hodges–Lehmann shift with its exact 95 %
interval, the exact signed-rank p, p after Holm's correction and for how many comparisons that is,
and the verdict. A sentence that rests on something else, such as an order of medians, says so.
"""
