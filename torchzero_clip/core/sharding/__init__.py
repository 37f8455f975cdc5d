"""Sharding: the layout of a DTensor's shards, the ranks that hold them, and owners of the whole.

Links see plain tensors: of a sharded parameter, they see the shard of this rank.
"""
