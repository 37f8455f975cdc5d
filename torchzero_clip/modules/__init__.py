"""The rules, one page each."""
