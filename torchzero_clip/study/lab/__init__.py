"""The lab: a page on this machine that shows what rules would have done to the norms of a run."""
