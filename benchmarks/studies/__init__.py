"""Studies: each answers one question that a page of the documentation asks."""
