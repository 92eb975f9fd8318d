"""HTTP server with vLLM's interface, over the simulator in real time or over the engine."""
