"""KV memory: blocks, the prefix tree, eviction orders and KV groups, behind one door, the protocol in `memory.py`."""
