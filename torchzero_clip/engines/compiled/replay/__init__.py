"""A step that is like one before, done again without links or lists."""
