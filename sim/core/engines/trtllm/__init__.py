"""TensorRT-LLM: its capacity policies, micro batches and context chunks."""
