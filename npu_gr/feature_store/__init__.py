"""Online features of users, read from a feature store when a request comes."""
