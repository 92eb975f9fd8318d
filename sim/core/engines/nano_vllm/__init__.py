"""nano-vLLM: its steps of prompts or of decodes."""
