"""Lists that record what is asked of them, and run it as programs."""
