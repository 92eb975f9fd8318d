"""KV memory: blocks, the prefix tree, eviction orders and KV groups, behind the protocol of `memory.py`."""
