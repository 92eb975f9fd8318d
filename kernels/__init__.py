"""Triton kernels for a paged KV cache and for mixtures of experts. Importing this package imports nothing.

The KV cache of one layer is one tensor

    kv[num_blocks, 2, block_size, kv_heads, head_dim]      K at [:, 0], V at [:, 1]

so a block of a layer is one dense run of bytes (fast to copy), and `kv[:, 0]` and `kv[:, 1]` are the
views [num_blocks, block_size, kv_heads, head_dim] that every kernel here takes. Layers are stacked in
front: [layers, num_blocks, 2, ...]. The kernels read strides and assume no more than 16-byte rows for
speed; any other order of the dimensions works too.

A token of a sequence at position p lies in slot `block_table[sequence, p // block_size] * block_size +
p % block_size`. Modules:

    rotate_store_kv.py norms and rotates new K and Q, and writes new K and V to their slots
    paged_decode.py    attention of one new token per sequence
    decode_schedule.py who computes what of it
    paged_prefill.py   causal attention of chunks of new tokens
    prefill_plan.py    which tiles, and pieces of long ones, a step with such chunks has
    merge_pieces.py    adds up the pieces of a tile that was cut
    copy_blocks.py     copies blocks inside the pool, to the host and back
    widen_blocks.py    copies fp8 blocks in 16 bits, for prompts
    fp8_linear.py      products with fp8 weights (fp8_group.py: how many inputs share a scale)
    mixture.py         a mixture of experts: routing.py, grouped_gemm.py and the weighted sum
    linear_hopper.py   products of few tokens on an H100 or H200 (linear_cuts.py: which, and how they are cut)
    rms_scale.py       what a norm divides by, for kernels that do it after a product
    reference.py       the same in plain PyTorch: what each kernel must compute

    prefill_hopper.py  what paged_prefill runs on an H100 or H200 (tensor_map.py: how that reads the cache)
    hopper.py          what that and linear_hopper.py share
    prefill_work.py    which work a program of it has; prefill_pipe.py: what its two schedules share
    prefill_overlapped.py, prefill_halved.py: the two schedules
    tile_rows.py       how many rows the tiles of a step have
    tile.py            fetching a tile through the block table and widening fp8, for both attentions
    capabilities.py    what a device can run
    launch.py          cheap repeated launches
    code_digest.py     which state of these kernels a recorded run was made with
"""
