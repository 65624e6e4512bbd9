"""TransportClassifier: classes by a map learned from optimal transport."""
