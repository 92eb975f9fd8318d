"""The Blocks page: the block pool as a grid, through a replay or by hand."""
