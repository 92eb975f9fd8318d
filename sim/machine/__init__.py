"""A GPU and a model: facts, weights, activations, the HBM budget and the layout of KV blocks."""
