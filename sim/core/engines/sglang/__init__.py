"""SGLang: its batches, queue orders, radix tree and retractions."""
