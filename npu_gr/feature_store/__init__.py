"""Online user features, read from a feature store when a request arrives."""
