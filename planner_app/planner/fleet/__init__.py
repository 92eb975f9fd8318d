"""Plans for fleets: how many replicas, behind which router, and the manifests that say so."""
