"""Tiers below the device: which blocks of KV are in host memory, and how they get there and back.

    offloading.py     when blocks are stored and loaded: vLLM's OffloadingConnector, its scheduler's side
    offload_lookup.py how many tokens a waiting request can load
    watched_blocks.py stores that must be done before others get their blocks
    host_blocks.py    what is in host memory, what is pinned by a transfer, what gives way
    host_eviction.py  the order in which it gives way: LRU and ARC
    content.py        names of offloaded blocks
    progress.py       how far each request is stored and loaded

    tiered_offloading.py, tiered_blocks.py, disk.py    the same with a disk behind the host

Nothing here moves or times a byte: a plan names the jobs, and whoever runs it reports which have ended.
"""
