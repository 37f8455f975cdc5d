"""The lab: a page in a browser that shows what rules would have done to the norms of a run."""
