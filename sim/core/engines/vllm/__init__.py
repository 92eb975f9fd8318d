"""vLLM: its step, also over layers that keep different tokens, and with a host tier."""
