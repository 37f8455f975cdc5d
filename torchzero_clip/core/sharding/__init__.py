"""Sharding: the layout of a DTensor's parts, the ranks that hold them, and owners of the whole.

Links see plain tensors: of a sharded parameter the part that is here.
"""
