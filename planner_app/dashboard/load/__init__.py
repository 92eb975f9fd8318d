"""The Load page: latency, goodput and cost against load, with several GPUs in one view."""
