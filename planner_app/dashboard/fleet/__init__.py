"""Page Fleet: replicas over time, hits per router, and one replica's death."""
