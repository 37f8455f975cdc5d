"""Sharding: the layout of a DTensor's shards, and the ranks that store shards or whole tensors.

Links receive plain tensors. If a parameter is sharded, a link receives the shard of this rank.
"""
